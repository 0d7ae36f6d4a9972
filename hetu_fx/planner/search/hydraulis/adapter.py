"""The Hydraulis search, as the table of searches knows it: a plan for each longest sequence.

The pool that Hydraulis' interval programme proposes becomes plans, one per range of longest sequences. A batch as the
profile describes it is dispatched and packed, for the shares of the pipelines and their micro-batches. Plans are
priced by the cost model that all searches share, for rows of the mean length of such a batch.

Where devices are unlike, a pipeline has its number of each kind. What it recomputes is said by its scheme, once for all
of its rows.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from hetu_fx.planner.dispatch.dispatch import Dispatch, dispatch
from hetu_fx.planner.dispatch.pack import Packing, packings
from hetu_fx.planner.dispatch.scheme_costs import Scheme, SequenceBatch, Strategy
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.search.device_orders import ranks_by_node, take_group
from hetu_fx.planner.search.hydraulis.pool import ALIGNMENT, LengthVariant, propose
from hetu_fx.planner.search.hydraulis.schemes import SchemeShape, devices_by_kind, fitting_schemes, make_pipeline
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.planner.values.program import ENOUGH, costs_for_length
from hetu_fx.plans.plan import Pipeline, Plan
from hetu_fx.plans.prediction import Prediction

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
        found.append(make_pipeline(shape, list(map(cluster.device, ranks)), problem))
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
