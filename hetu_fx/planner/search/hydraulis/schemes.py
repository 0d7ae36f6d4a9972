"""Hydraulis' parallel schemes, from a profile and a cluster of equal devices: seconds, and rows that they hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.dispatch.strategy import Scheme, TimeFit, fit_times
from hetu_fx.planner.price.stage import StageCosts, stage_costs
from hetu_fx.planner.search.hydraulis.memory import ALIGNMENT
from hetu_fx.planner.search.malleus.adapter import degrees
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.block_times import BlockTime
from hetu_fx.planner.values.device_memory import fixed_bytes, in_flight
from hetu_fx.planner.values.lengths import ENOUGH
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Stage

_AMPLE = 1 << 40  # tokens that no row has


def fitting_schemes(problem: Problem) -> tuple[Scheme, ...]:
    """Return the schemes of powers of two that hold a token at least."""
    found = (_scheme(problem, tensor_parallel, stages) for tensor_parallel, stages in _shapes(problem))
    return tuple(scheme for scheme in found if scheme is not None)


def knows_times(problem: Problem) -> bool:
    """Tell whether seconds by length are measured or given for the devices, or can be counted."""
    kind = problem.cluster.devices[0].kind
    return bool(problem.profile.block_times(kind)) or len(problem.profile.by_length) >= ENOUGH


def _shapes(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield (tensor parallel degree, stages)."""
    count, blocks = len(problem.cluster.devices), problem.costs.num_blocks
    given = problem.profile.block_times(problem.cluster.devices[0].kind)
    for size in degrees(problem):
        if not given or size in given:
            stages = (1 << i for i in range(count.bit_length()))
            yield from ((size, p) for p in stages if size * p <= count and p <= blocks)


def _scheme(problem: Problem, tensor_parallel: int, stages: int) -> Scheme | None:
    known = problem.profile.by_length
    priced = {length: _priced(problem, costs, tensor_parallel, stages) for length, costs in known.items()}
    time = problem.profile.block_times(problem.cluster.devices[0].kind).get(tensor_parallel)
    length = _max_length(problem, priced, tensor_parallel * stages, time)
    if length < 1:
        return None
    times = _estimated(priced) if time is None else _given(time, math.ceil(problem.costs.num_blocks / stages))
    return Scheme(tensor_parallel, stages, times, length)


def _priced(problem: Problem, costs: ProgramCosts, size: int, stages: int) -> tuple[StageCosts, ...]:
    """Return the costs of every stage of one pipeline on devices like the cluster's, in one node."""
    alike = [replace(problem.cluster.devices[0], rank=rank, node="0") for rank in range(size * stages)]
    cluster = Cluster(tuple(alike), problem.cluster.intra, problem.cluster.inter)
    groups = (tuple(range(start, start + size)) for start in range(0, size * stages, size))
    return stage_costs(Pipeline(tuple(Stage(ranks) for ranks in groups)), costs, cluster)


def _estimated(priced: dict[int, tuple[StageCosts, ...]]) -> TimeFit:
    """Fit the seconds that the slowest stage takes for a row of each length."""
    samples = [(length, max(stage.seconds.slope for stage in stages)) for length, stages in priced.items()]
    fit = fit_times(samples).fit
    fixed = max(stage.seconds.fixed for stages in priced.values() for stage in stages)
    return TimeFit(fit.a, fit.b, fit.c + fixed)


def _given(time: BlockTime, blocks: int) -> TimeFit:
    return TimeFit(time.a * blocks, time.b * blocks, time.c * blocks)


def _max_length(
    problem: Problem, priced: dict[int, tuple[StageCosts, ...]], devices: int, time: BlockTime | None
) -> int:
    """Return the most tokens of a row that all stages have memory for, in whole blocks where there are some."""
    length, stages = max(priced.items(), key=lambda pair: pair[0])
    replicas, blocks = (
        max(1, len(problem.cluster.devices) // devices),
        math.ceil(problem.costs.num_blocks / len(stages)),
    )
    given = 0.0 if time is None else time.bytes_per_token * blocks
    rooms = [_tokens(problem, stages, index, given, length, replicas) for index in range(len(stages))]
    tokens = math.floor(min(*rooms, _AMPLE))
    return tokens // ALIGNMENT * ALIGNMENT if tokens >= ALIGNMENT else tokens


def _tokens(
    problem: Problem, stages: Sequence[StageCosts], index: int, given: float, length: int, replicas: int
) -> float:
    """Return how many tokens of a row fit a stage's devices: `given` bytes per token, else as rows of `length` keep."""
    parts, share, options = stages[index].parts, stages[index].share(0), problem.options
    held = fixed_bytes(parts.parameter_bytes_at(share), zero=options.zero, num_replicas=replicas)
    least = min(device.memory_bytes for device in problem.cluster.devices)
    left = least * options.memory_fraction - sum(size for _, size in held)
    kept = given or parts.activation_bytes_at(share) / length
    flying = in_flight(options.schedule, index, len(stages), len(stages))
    return max(0.0, left / (flying * kept)) if kept else math.inf
