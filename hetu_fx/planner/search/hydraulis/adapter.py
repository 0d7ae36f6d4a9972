"""The Hydraulis search, as the table of searches knows it: a plan for each longest sequence.

The pool that Hydraulis' interval programme proposes becomes plans, one per range of longest sequences. A batch as the
profile describes it is dispatched and packed, for the shares of the pipelines and their micro-batches. Plans are
priced by the cost model that all searches share, for rows of the mean length of such a batch.

Where devices are unlike, a pipeline has its number of each kind. What it recomputes is said by its scheme, once for all
of its rows.

What a pipeline of a pool may be on the devices there are: its groups, and how they hold a row. A stage's group is of
devices of one kind, or of several, which share what it splits by their speeds. It splits heads (tensor parallel), the
tokens of rows (context parallel), or both as a grid. Where a scheme has no room for the longest sequence, another one
like it recomputes its blocks: it holds longer rows, and takes more time for each.

Seconds are fitted to the prices of a pipeline's stages, or as a profile gives them for groups of one kind that split
heads. The rows that a scheme holds are those that all of its devices have memory for.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.dispatch.assignment import ANY_LENGTH, fit_pipeline_times
from hetu_fx.planner.dispatch.dispatch import Dispatch, dispatch
from hetu_fx.planner.dispatch.pack import Packing, packings
from hetu_fx.planner.dispatch.scheme_costs import Scheme, SequenceBatch, Strategy, TimeFit
from hetu_fx.planner.price.stage_seconds import StageCosts, stage_costs
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.search.device_orders import ranks_by_node, take_group
from hetu_fx.planner.search.hydraulis.pool import ALIGNMENT, LengthVariant, propose
from hetu_fx.planner.search.malleus.adapter import degrees
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.planner.values.device_memory import fixed_bytes, in_flight
from hetu_fx.planner.values.profile_file import BlockTime
from hetu_fx.planner.values.program import ENOUGH, ProgramCosts, costs_for_length
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import Prediction

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
        ratios = _speed_ratios([device.speed for device in devices], parts) if self.is_mixed else ()
        return Stage(ranks, ratios, blocks, self.context, again)


def _speed_ratios(speeds: Sequence[float], parts: int) -> tuple[int, ...]:
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
    pipeline = PartedPipeline.of(_make_pipeline(shape, devices, problem), problem.costs.num_blocks)
    return pipeline, replace(problem.cluster, devices=devices)


def _make_pipeline(shape: SchemeShape, devices: Sequence[Device], problem: Problem) -> Pipeline:
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


_MOST_NUMBERS = 600  # of devices of each kind, for which the best pipelines are found within seconds
_INTERVALS = 64  # lengths are told apart in so many steps at most


def variants(problem: Problem) -> tuple[LengthVariant, ...]:
    """Return the strategies of the pool by growing longest sequence, one for each run of lengths; none if none fits."""
    counts, schemes = problem.profile.sequences, fitting_schemes(problem)
    devices = _devices(schemes, counts, list(map(len, devices_by_kind(problem.cluster))))
    if not devices:
        return ()
    step = math.ceil(max(counts) / _INTERVALS / ALIGNMENT) * ALIGNMENT
    runs = itertools.groupby(propose(schemes, counts, devices, step=step), key=lambda variant: variant.strategy)
    return tuple([*run][-1] for _, run in runs)


def _devices(schemes: Sequence[Scheme], counts: Mapping[int, float], given: Sequence[int]) -> tuple[int, ...]:
    """Return how many devices of each kind the pool is for; none if no scheme holds every sequence.

    Of one kind, as many as equal pipelines take that do a batch soonest.
    """
    longest = max(counts)
    if len(given) > 1:
        return tuple(given) if any(scheme.max_length >= longest for scheme in schemes) else ()
    (most,) = given

    def seconds(scheme: Scheme) -> float:
        work = math.fsum(count * scheme.times.seconds(length) for length, count in counts.items())
        return work / (most // scheme.devices) + scheme.fill * scheme.times.seconds(longest)

    holding = [scheme for scheme in schemes if scheme.max_length >= longest]
    best = min(holding, key=lambda scheme: (seconds(scheme), scheme.devices, scheme.stages), default=None)
    return () if best is None else (most // best.devices * best.devices,)


def typical_batch(counts: Mapping[int, float], longest: int, size: int) -> SequenceBatch:
    """Return `size` lengths of at most `longest` tokens, spread as the counts are, the longest among them."""
    lengths = [length for length in sorted(counts) if length <= longest and counts[length] > 0] or [longest]
    sums = list(itertools.accumulate(counts.get(length, 1.0) for length in lengths))
    places = ((index + 0.5) / size * sums[-1] for index in range(size))
    drawn = [lengths[min(bisect.bisect_left(sums, place), len(lengths) - 1)] for place in places]
    return SequenceBatch((*drawn[:-1], lengths[-1]))


def schemes_with_lengths(dispatched: Dispatch) -> list[tuple[Scheme, tuple[int, ...]]]:
    """Return the scheme and the lengths of each pipeline of a dispatch."""
    pairs = zip(dispatched.strategy.pipelines, dispatched.pipelines, strict=True)
    return [(scheme, tuple(dispatched.batch.lengths[i] for i in group)) for scheme, group in pairs]


def variant_plan(variant: LengthVariant, problem: Problem) -> tuple[Plan, tuple[Packing, ...]]:
    """Return a variant's plan, and how the sequences of a typical batch are packed under it."""
    counts, schemes = problem.profile.sequences, variant.strategy.pipelines
    done = packings(
        schemes_with_lengths(dispatch(variant.strategy, typical_batch(counts, variant.longest, problem.costs.rows)))
    )
    shares = _shares(done)
    pipelines = tuple(
        Pipeline(
            stages=placed.stages,
            share=shares[scheme],
            micro_batches=max(len(packing.rows) or 1 for packing in done if packing.scheme == scheme),
            max_length=scheme.max_length if scheme.max_length < variant.longest else None,
        )
        for scheme, placed in zip(schemes, _placed(variant.strategy, problem), strict=True)
    )
    written = replace(problem.plan(pipelines), max_length=variant.longest)
    return written.with_blocks(problem.costs.num_blocks), done


def _shares(done: Sequence[Packing]) -> dict[Scheme, int]:
    """Return the percentage of the tokens that a pipeline of each scheme has on average, 1 at least."""
    tokens = [(packing.scheme, sum(packing.lengths)) for packing in done]
    total = sum(count for _, count in tokens)
    of_scheme = {scheme: [count for other, count in tokens if other == scheme] for scheme, _ in tokens}
    return {scheme: max(1, round(100 * fmean(counts) / total)) for scheme, counts in of_scheme.items()}


def _placed(strategy: Strategy, problem: Problem) -> list[Pipeline]:
    """Return each pipeline on devices: the groups of a kind in the fullest node that still has room for them."""
    cluster = problem.cluster
    free = [list(ranks_by_node(devices, cluster).values()) for devices in devices_by_kind(cluster)]
    found = []
    for scheme in strategy.pipelines:
        counts = scheme.kinds or (scheme.group,)
        ranks = [
            rank
            for _ in range(scheme.stages)
            for own, count in zip(free, counts, strict=True)
            for rank in take_group(own, count, fullest=True)
        ]
        shape = SchemeShape(counts, scheme.stages, scheme.context, scheme.recomputes)
        found.append(_make_pipeline(shape, list(map(cluster.device, ranks)), problem))
    return found


def _find(problem: Problem) -> Candidates:
    found: dict[Plan, float] = {}
    asked = variants(problem)
    for number, variant in enumerate(asked):
        problem.tell(f"hydraulis: sequences of up to {variant.longest} tokens", number, len(asked))
        plan, _ = variant_plan(variant, problem)
        found[plan] = _predict(plan, problem).seconds
    return found


def _predict(plan: Plan, problem: Problem) -> Prediction:
    """Price a plan for rows of the mean length that batches have which it is for."""
    assert plan.max_length is not None, "a variant is for some longest sequence"
    batch = typical_batch(problem.profile.sequences, plan.max_length, problem.costs.rows)
    mean = max(1, round(sum(batch.lengths) / len(batch.lengths)))
    prediction = predict(plan, costs_for_length(problem.profile.by_length, mean), problem.cluster)
    return replace(prediction, why=f"{prediction.why}; rows of {mean} tokens, the mean up to {plan.max_length}")


def _lacks(problem: Problem) -> str:
    can_cut = problem.options.pipelines and problem.options.micro_batches[-1] > 1
    if not problem.profile.sequences or not problem.profile.tokens_per_row:
        return 'the profile says nothing of lengths\nhint: give tokens_per_row, and sequences such as {"512": 30}'
    if not problem.costs.num_blocks or not can_cut:
        return "its pipelines are cut into stages and micro-batches, which the program cannot be"
    kinds = devices_by_kind(problem.cluster)
    counts = list(map(len, kinds))
    if len(kinds) > 1 and math.prod(count + 1 for count in counts) > _MOST_NUMBERS:
        return (
            f"there are too many ways to choose among {' + '.join(map(str, counts))} devices of {len(kinds)} kinds "
            f"(over {_MOST_NUMBERS})\nhint: use another search"
        )
    unknown = [devices[0].kind for devices in kinds if not _knows_times(problem, devices[0].kind)]
    if unknown:
        return (
            f"seconds by length are not known for {unknown[0]!r}\nhint: give times of that kind, or the program at "
            f"three lengths (hetu_fx.profile(model, batch, more=[shorter, longer]))"
        )
    return ""


def _knows_times(problem: Problem, kind: str) -> bool:
    """Tell whether seconds by length are measured or given for a kind of device, or can be counted."""
    return bool(problem.profile.block_times(kind)) or len(problem.profile.by_length) >= ENOUGH


HYDRAULIS = Search(
    name="hydraulis",
    applies="sequences of different lengths: a plan for each longest sequence of a batch",
    lacks=_lacks,
    find=_find,
    predict=_predict,
    simulates=lambda problem: False,
)
