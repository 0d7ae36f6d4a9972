"""The Hydraulis search, as the table of searches knows it: a plan for each longest sequence.

The pool that Hydraulis' interval programme proposes becomes plans, one per range of longest sequences. A batch as the
profile describes it is dispatched and packed, for the shares of the pipelines and their micro-batches. Plans are
priced by the cost model that all searches share, for rows of the mean length of such a batch.

Nothing is recomputed. What a pipeline would have to depends on the lengths that a batch packs into its rows, while a
plan says it once and a scheme has one fit of seconds; a sequence that a scheme has no room for goes to one of more
devices instead. A scheme's seconds and the rows that it holds are those of equal devices, from the profile.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.dispatch.assignment import ANY_LENGTH, times_of
from hetu_fx.planner.dispatch.dispatch import Dispatch, dispatch
from hetu_fx.planner.dispatch.pack import Packing, pack, pack_quickly
from hetu_fx.planner.dispatch.strategy import Scheme, SequenceBatch, Strategy, TimeFit
from hetu_fx.planner.price.stage import StageCosts, stage_costs
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.search.device_orders import ranks_by_node
from hetu_fx.planner.search.hydraulis.pool import ALIGNMENT, LengthVariant, propose
from hetu_fx.planner.search.malleus.adapter import degrees
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.planner.values.device_memory import fixed_bytes, in_flight
from hetu_fx.planner.values.profile_file import BlockTime
from hetu_fx.planner.values.program import ENOUGH, costs_at
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import Prediction

_INTERVALS = 64  # lengths are told apart in so many steps at most


def variants(problem: Problem) -> tuple[LengthVariant, ...]:
    """Return the strategies of the pool by growing longest sequence, one for each run of lengths; none if none fits."""
    counts, schemes = problem.profile.sequences, fitting_schemes(problem)
    devices = _devices(schemes, counts, len(problem.cluster.devices))
    if not devices:
        return ()
    step = math.ceil(max(counts) / _INTERVALS / ALIGNMENT) * ALIGNMENT
    runs = itertools.groupby(propose(schemes, counts, devices, step=step), key=lambda variant: variant.strategy)
    return tuple([*run][-1] for _, run in runs)


def _devices(schemes: Sequence[Scheme], counts: Mapping[int, float], most: int) -> int:
    """Return how many devices equal pipelines take that hold every sequence and do a batch soonest; 0 if none do."""
    longest = max(counts)

    def seconds(scheme: Scheme) -> float:
        work = math.fsum(count * scheme.times.seconds(length) for length, count in counts.items())
        return work / (most // scheme.devices) + (scheme.stages - 1) * scheme.times.seconds(longest)

    holding = [scheme for scheme in schemes if scheme.max_length >= longest]
    best = min(holding, key=lambda scheme: (seconds(scheme), scheme.devices, scheme.stages), default=None)
    return 0 if best is None else most // best.devices * best.devices


def typical_batch(counts: Mapping[int, float], longest: int, size: int) -> SequenceBatch:
    """Return `size` lengths of at most `longest` tokens, spread as the counts are, the longest among them."""
    lengths = [length for length in sorted(counts) if length <= longest and counts[length] > 0] or [longest]
    sums = list(itertools.accumulate(counts.get(length, 1.0) for length in lengths))
    places = ((index + 0.5) / size * sums[-1] for index in range(size))
    drawn = [lengths[min(bisect.bisect_left(sums, place), len(lengths) - 1)] for place in places]
    return SequenceBatch((*drawn[:-1], lengths[-1]))


def packings(dispatched: Dispatch, *, seed: int = 0) -> tuple[Packing, ...]:
    """Return the packings of a dispatch's pipelines, those that could be last packed with care."""
    packed = [pack_quickly(scheme, lengths) for scheme, lengths in asked(dispatched)]
    careful: set[int] = set()
    while (last := max(range(len(packed)), key=lambda i: packed[i].seconds)) not in careful:
        packed[last] = pack(packed[last].scheme, packed[last].lengths, seed=seed)
        careful.add(last)
    return tuple(packed)


def asked(dispatched: Dispatch) -> list[tuple[Scheme, tuple[int, ...]]]:
    """Return the scheme and the lengths of each pipeline of a dispatch."""
    pairs = zip(dispatched.strategy.pipelines, dispatched.pipelines, strict=True)
    return [(scheme, tuple(dispatched.batch.lengths[i] for i in group)) for scheme, group in pairs]


def plan_of(variant: LengthVariant, problem: Problem) -> tuple[Plan, tuple[Packing, ...]]:
    """Return a variant's plan, and how the sequences of a typical batch are packed under it."""
    counts, schemes = problem.profile.sequences, variant.strategy.pipelines
    done = packings(dispatch(variant.strategy, typical_batch(counts, variant.longest, problem.costs.rows)))
    shares = _shares(done)
    pipelines = tuple(
        Pipeline(
            stages=tuple(map(Stage, stages)),
            share=shares[scheme],
            micro_batches=max(len(packing.rows) or 1 for packing in done if packing.scheme == scheme),
            max_length=scheme.max_length if scheme.max_length < variant.longest else None,
        )
        for scheme, stages in zip(schemes, _placed(variant.strategy, problem.cluster), strict=True)
    )
    written = replace(problem.plan(pipelines), max_length=variant.longest)
    return written.with_blocks(problem.costs.num_blocks), done


def _shares(done: Sequence[Packing]) -> dict[Scheme, int]:
    """Return the percentage of the tokens that a pipeline of each scheme has on average, 1 at least."""
    tokens = [(packing.scheme, sum(packing.lengths)) for packing in done]
    total = sum(count for _, count in tokens)
    of_scheme = {scheme: [count for other, count in tokens if other == scheme] for scheme, _ in tokens}
    return {scheme: max(1, round(100 * fmean(counts) / total)) for scheme, counts in of_scheme.items()}


def _placed(strategy: Strategy, cluster: Cluster) -> list[list[tuple[int, ...]]]:
    """Return the devices of each stage of each pipeline: a group in the fullest node that still has room for it."""
    free = list(ranks_by_node(cluster.devices, cluster).values())
    return [[_taken(free, scheme.tensor_parallel) for _ in range(scheme.stages)] for scheme in strategy.pipelines]


def _taken(free: list[list[int]], size: int) -> tuple[int, ...]:
    """Take devices of one node; of several where none has enough left."""
    roomy = [ranks for ranks in free if len(ranks) >= size]
    source = min(roomy, key=len) if roomy else list(itertools.chain.from_iterable(free))
    taken = tuple(source[:size])
    for ranks in free:
        ranks[:] = [rank for rank in ranks if rank not in taken]
    return taken


def _find(problem: Problem) -> Candidates:
    found: dict[Plan, float] = {}
    asked = variants(problem)
    for number, variant in enumerate(asked):
        problem.tell(f"hydraulis: sequences of up to {variant.longest} tokens", number, len(asked))
        plan, _ = plan_of(variant, problem)
        found[plan] = _predict(plan, problem).seconds
    return found


def _predict(plan: Plan, problem: Problem) -> Prediction:
    """Price a plan for rows of the mean length that batches have which it is for."""
    assert plan.max_length is not None, "a variant is for some longest sequence"
    batch = typical_batch(problem.profile.sequences, plan.max_length, problem.costs.rows)
    mean = max(1, round(sum(batch.lengths) / len(batch.lengths)))
    prediction = predict(plan, costs_at(problem.profile.by_length, mean), problem.cluster)
    return replace(prediction, why=f"{prediction.why}; rows of {mean} tokens, the mean up to {plan.max_length}")


def _lacks(problem: Problem) -> str:
    kinds = sorted({(device.kind, device.speed) for device in problem.cluster.devices})
    can_cut = problem.options.pipelines and problem.options.micro_batches[-1] > 1
    if not problem.profile.sequences or not problem.profile.tokens_per_row:
        return 'the profile says nothing of lengths; give tokens_per_row, and sequences such as {"512": 30}'
    if not problem.costs.num_blocks or not can_cut:
        return "its pipelines are cut into stages and micro-batches, which the program cannot be"
    if len(kinds) > 1:
        return f"it plans for equal devices, but these have (kind, FLOP/s) {kinds}; use another search"
    if not _knows_times(problem):
        return (
            f"seconds by length are not known for {kinds[0][0]!r}; give times of that kind, or the program at three "
            f"lengths (hetu_fx.profile(model, batch, more=[shorter, longer]))"
        )
    return ""


HYDRAULIS = Search(
    name="hydraulis",
    applies="equal devices and sequences of unlike lengths: a plan for each longest sequence of a batch",
    lacks=_lacks,
    find=_find,
    predict=_predict,
    simulates=lambda problem: False,
)


def fitting_schemes(problem: Problem) -> tuple[Scheme, ...]:
    """Return the schemes of powers of two that hold a token at least."""
    found = (_scheme(problem, tensor_parallel, stages) for tensor_parallel, stages in _shapes(problem))
    return tuple(scheme for scheme in found if scheme is not None)


def _knows_times(problem: Problem) -> bool:
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
    known, (pipeline, cluster) = problem.profile.by_length, _alone(problem, tensor_parallel, stages)
    time = problem.profile.block_times(problem.cluster.devices[0].kind).get(tensor_parallel)
    priced = stage_costs(pipeline, known[max(known)], cluster)
    length = _max_length(problem, priced, max(known), tensor_parallel * stages, time)
    if length < 1:
        return None
    blocks = math.ceil(problem.costs.num_blocks / stages)
    times = times_of(pipeline, known, cluster) if time is None else _given(time, blocks)
    return Scheme(tensor_parallel, stages, times, length)


def _alone(problem: Problem, size: int, stages: int) -> tuple[Pipeline, Cluster]:
    """Return a pipeline on devices like the cluster's, in one node, and a cluster of these."""
    alike = [replace(problem.cluster.devices[0], rank=rank, node="0") for rank in range(size * stages)]
    groups = (tuple(range(start, start + size)) for start in range(0, size * stages, size))
    cluster = replace(problem.cluster, devices=tuple(alike))
    return Pipeline(tuple(Stage(ranks) for ranks in groups)), cluster


def _given(time: BlockTime, blocks: int) -> TimeFit:
    return TimeFit(time.a * blocks, time.b * blocks, time.c * blocks)


def _max_length(
    problem: Problem, stages: Sequence[StageCosts], length: int, devices: int, time: BlockTime | None
) -> int:
    """Return the most tokens of a row that all stages have memory for, in whole blocks where there are some.

    `stages` are priced for rows of `length` tokens.
    """
    replicas = max(1, len(problem.cluster.devices) // devices)
    blocks = math.ceil(problem.costs.num_blocks / len(stages))
    given = 0.0 if time is None else time.bytes_per_token * blocks
    rooms = [_tokens(problem, stages, index, given, length, replicas) for index in range(len(stages))]
    tokens = math.floor(min(*rooms, ANY_LENGTH))
    return tokens // ALIGNMENT * ALIGNMENT if tokens >= ALIGNMENT else tokens


def _tokens(
    problem: Problem, stages: Sequence[StageCosts], index: int, given: float, length: int, replicas: int
) -> float:
    """Return how many tokens of a row fit a stage's devices: `given` bytes per token, else as rows of `length` keep."""
    parts, share, options = stages[index].parts, stages[index].share(0), problem.options
    parameters, state = parts.parameter_bytes_at(share), problem.costs.state
    held = fixed_bytes(parameters, zero=options.zero, num_replicas=replicas, state=state)
    least = min(device.memory_bytes for device in problem.cluster.devices)
    left = least * options.memory_fraction - sum(size for _, size in held)
    kept = given or parts.activation_bytes_at(share) / length
    flying = in_flight(options.schedule, index, len(stages), len(stages))
    return max(0.0, left / (flying * kept)) if kept else math.inf
