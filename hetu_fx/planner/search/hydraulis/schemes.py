"""What a pipeline of a pool may be on the devices there are: its groups, and how they hold a row.

A stage's group is of devices of one kind, or of several, which share what it splits by their speeds. It splits heads
(tensor parallel), the tokens of rows (context parallel), or both as a grid. Where a scheme has no room for the longest
sequence, another one like it recomputes its blocks: it holds longer rows, and takes more time for each.

Seconds are fitted to the prices of a pipeline's stages, or as a profile gives them for groups of one kind that split
heads. The rows that a scheme holds are those that all of its devices have memory for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.dispatch.assignment import ANY_LENGTH, fit_pipeline_times
from hetu_fx.planner.dispatch.scheme_costs import Scheme, TimeFit
from hetu_fx.planner.price.stage_seconds import StageCosts, stage_costs
from hetu_fx.planner.search.hydraulis.pool import ALIGNMENT
from hetu_fx.planner.search.malleus.adapter import degrees
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.device_memory import fixed_bytes, in_flight
from hetu_fx.planner.values.profile_file import BlockTime
from hetu_fx.planner.values.program import ENOUGH, ProgramCosts
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.plan import Pipeline, Stage

_LIKE = 0.9  # devices are of one kind that have this share at least of its fastest one's speed, and of its memory


def devices_by_kind(cluster: Cluster) -> tuple[tuple[Device, ...], ...]:
    """Return the devices of each kind, which have nearly the same speed and memory; the fastest kind first."""
    found: list[list[Device]] = []
    for device in sorted(cluster.devices, key=lambda one: (-one.speed, one.kind, -one.memory_bytes)):
        alike = next((group for group in found if _are_alike(group[0], device)), None)
        if alike is None:
            found.append([device])
        else:
            alike.append(device)
    return tuple(map(tuple, found))


def _are_alike(first: Device, other: Device) -> bool:
    sizes = sorted((first.memory_bytes, other.memory_bytes))
    return first.kind == other.kind and other.speed >= _LIKE * first.speed and sizes[0] >= _LIKE * sizes[1]


def _one_of(devices: Sequence[Device]) -> Device:
    """Return a device of a kind that is as slow as any of it, and has as little memory."""
    slowest = min(devices, key=lambda device: device.speed)
    return replace(slowest, memory_bytes=min(device.memory_bytes for device in devices))


@dataclass(frozen=True, slots=True)
class SchemeShape:
    """How many devices of each kind a stage has, in how many parts they share the tokens, and if blocks are recomputed.

    Devices of unlike kinds make one group that splits heads, or one that shares tokens, no grid.
    """

    counts: tuple[int, ...]
    stages: int
    context: int = 1
    recompute: bool = False

    @property
    def group(self) -> int:
        """Return how many devices split heads with each other."""
        return sum(self.counts) // self.context

    @property
    def is_mixed(self) -> bool:
        """Tell whether a stage has devices of several kinds."""
        return sum(map(bool, self.counts)) > 1

    def stage(self, devices: Sequence[Device], blocks: int, costs: ProgramCosts) -> Stage:
        """Return a stage on these devices, which have what is split by their speeds."""
        ranks, again = tuple(device.rank for device in devices), blocks if self.recompute else 0
        parts = costs.units if self.context == 1 else costs.sequence_units
        ratios = _shares([device.speed for device in devices], parts) if self.is_mixed else ()
        return Stage(ranks, ratios, blocks, self.context, again)


def _shares(speeds: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return whole numbers of so many parts in proportion to speeds, 1 at least: those nearest to it."""
    exact = [parts * speed / math.fsum(speeds) for speed in speeds]
    found = [max(1, math.floor(share)) for share in exact]
    while sum(found) < parts:
        least = max(range(len(found)), key=lambda i: (exact[i] - found[i], -i))
        found[least] += 1
    return tuple(found)


def fitting_schemes(problem: Problem) -> tuple[Scheme, ...]:
    """Return the schemes of powers of two that hold a token at least."""
    longest = max(problem.profile.sequences, default=0)
    found: list[Scheme] = []
    for shape in _shapes(problem):
        scheme = _scheme(problem, shape)
        found += [scheme] if scheme is not None else []
        if (scheme is None or scheme.max_length < longest) and _may_recompute(problem, shape):
            again = _scheme(problem, replace(shape, recompute=True))
            found += [again] if again is not None and again.max_length > (scheme.max_length if scheme else 0) else []
    return tuple(found)


def _may_recompute(problem: Problem, shape: SchemeShape) -> bool:
    return problem.options.recompute and len(problem.profile.by_length) >= ENOUGH and _given(problem, shape) is None


def _shapes(problem: Problem) -> Iterator[SchemeShape]:
    """Yield what a pipeline may be: first of one kind of devices, splitting heads alone."""
    kinds = devices_by_kind(problem.cluster)
    stages = _powers(problem.costs.num_blocks)
    alone = [tuple(int(i == j) for j in range(len(kinds))) for i in range(len(kinds))]
    contexts = _powers(problem.costs.sequence_units) if problem.options.context_parallel else [1]
    for context, (own, devices) in itertools.product(contexts, zip(alone, kinds, strict=True)):
        given = problem.profile.block_times(devices[0].kind)
        for size in degrees(problem):
            group = size * context
            if (given and (size not in given or context > 1)) or not _is_in_a_node(group, devices):
                continue
            counts = tuple(group * one for one in own)
            yield from (SchemeShape(counts, p, context) for p in stages if group * p <= len(devices))
    if len(kinds) > 1 and len(problem.profile.by_length) >= ENOUGH:
        yield from _mixed_shapes(problem, list(map(len, kinds)))


def _is_in_a_node(group: int, devices: Sequence[Device]) -> bool:
    """Tell whether a node has so many of the devices; a group of all of them may lie in several."""
    nodes = [device.node for device in devices]
    return group <= max(map(nodes.count, nodes)) or group == len(devices)


def _mixed_shapes(problem: Problem, most: Sequence[int]) -> Iterator[SchemeShape]:
    """Yield groups that have devices of all kinds: they split heads, if there are as many, or share tokens."""
    for counts in itertools.product(*map(_powers, most)):
        size = sum(counts)
        if problem.options.tensor_parallel and size <= problem.costs.units:
            yield SchemeShape(counts, 1)
        if problem.options.context_parallel and size <= problem.costs.sequence_units:
            yield SchemeShape(counts, 1, context=size)


def _powers(most: int) -> list[int]:
    """Return the powers of two up to a number, 1 at least."""
    return [1 << power for power in range(max(1, most).bit_length())]


def _given(problem: Problem, shape: SchemeShape) -> BlockTime | None:
    """Return how long a block takes by the profile, which knows groups of one kind that split heads."""
    if shape.is_mixed or shape.context > 1 or shape.recompute:
        return None
    devices = devices_by_kind(problem.cluster)[shape.counts.index(sum(shape.counts))]
    return problem.profile.block_times(devices[0].kind).get(shape.group)


def _scheme(problem: Problem, shape: SchemeShape) -> Scheme | None:
    """Return the scheme of a shape; None where it holds no token."""
    known, time = problem.profile.by_length, _given(problem, shape)
    if time is None and len(known) < ENOUGH:
        return None
    pipeline, cluster = _alone(problem, shape)
    length = _max_length(problem, pipeline, cluster, time)
    if length < 1:
        return None
    blocks = math.ceil(problem.costs.num_blocks / shape.stages)
    if time is None:
        times = fit_pipeline_times(pipeline, known, cluster)
    else:
        times = TimeFit(time.a * blocks, time.b * blocks, time.c * blocks)
    kinds = shape.counts if len(shape.counts) > 1 else ()
    return Scheme(
        shape.group, shape.stages, times, length, context=shape.context, recomputes=shape.recompute, kinds=kinds
    )


def _alone(problem: Problem, shape: SchemeShape) -> tuple[PartedPipeline, Cluster]:
    """Return a pipeline on devices like the cluster's, in one node, and a cluster of these."""
    of_kinds = map(_one_of, devices_by_kind(problem.cluster))
    alike = [one for one, count in zip(of_kinds, shape.counts, strict=True) for _ in range(count)] * shape.stages
    devices = tuple(replace(one, rank=rank, node="0") for rank, one in enumerate(alike))
    pipeline = PartedPipeline.of(make_pipeline(shape, devices, problem), problem.costs.num_blocks)
    return pipeline, replace(problem.cluster, devices=devices)


def make_pipeline(shape: SchemeShape, devices: Sequence[Device], problem: Problem) -> Pipeline:
    """Return the pipeline of a shape on devices, those of a stage one after another."""
    size, (least, more) = sum(shape.counts), divmod(problem.costs.num_blocks, shape.stages)
    groups = [devices[start : start + size] for start in range(0, len(devices), size)]
    blocks = (least + (index < more) for index in range(shape.stages))
    return Pipeline(tuple(shape.stage(own, some, problem.costs) for own, some in zip(groups, blocks, strict=True)))


def _max_length(problem: Problem, pipeline: PartedPipeline, cluster: Cluster, time: BlockTime | None) -> int:
    """Return the most tokens of a row that all devices have memory for, in whole blocks where there are some."""
    known = problem.profile.by_length
    priced = stage_costs(pipeline, known[max(known)], cluster)
    replicas = max(1, len(problem.cluster.devices) // len(cluster.devices))
    given = 0.0 if time is None else time.bytes_per_token * math.ceil(problem.costs.num_blocks / len(priced))
    rooms = [
        _tokens(problem, priced, (index, place), cluster, given, replicas)
        for index, stage in enumerate(priced)
        for place in range(len(stage.stage.devices))
    ]
    tokens = math.floor(min(*rooms, ANY_LENGTH))
    return tokens // ALIGNMENT * ALIGNMENT if tokens >= ALIGNMENT else tokens


def _tokens(
    problem: Problem, stages: Sequence[StageCosts], at: tuple[int, int], cluster: Cluster, given: float, replicas: int
) -> float:
    """Return how many tokens of a row fit a device: `given` bytes per token, else as rows of the longest known keep."""
    (index, place), options = at, problem.options
    stage = stages[index]
    held = fixed_bytes(
        stage.parameter_bytes(place), zero=options.zero, num_replicas=replicas, state=problem.costs.state
    )
    device = cluster.device(stage.stage.devices[place])
    left = device.memory_bytes * options.memory_fraction - sum(size for _, size in held)
    flying = in_flight(options.schedule, index, len(stages), len(stages))
    kept = given * flying or _row_bytes(problem, stages, at, flying) / max(problem.profile.by_length)
    return max(0.0, left / kept) if kept else math.inf


def _row_bytes(problem: Problem, stages: Sequence[StageCosts], at: tuple[int, int], flying: int) -> float:
    """Return what a device holds of so many rows in flight of the longest known, one of them being recomputed."""
    (index, place), known = at, problem.profile.by_length
    stage = stages[index]
    if not stage.stage.recompute:
        return flying * stage.by_device[place].activation_bytes_at(stage.share(place))
    start = sum(one.stage.blocks or 0 for one in stages[:index])
    costs = known[max(known)].kept_by(stage.stage, start, place)
    held = costs.footprint(start, start + (stage.stage.blocks or 0), stage.share(place))
    return (flying - 1) * held.kept.slope + max(held.kept.slope, *(line.slope for line in held.later))
