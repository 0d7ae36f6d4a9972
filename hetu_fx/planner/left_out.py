"""Why a plan leaves devices out, and from which link or batch on they would pay: another replica on them is priced."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from hetu_fx.base.words import format_used_bytes, ranks_text, rate_text, seconds_text
from hetu_fx.planner.search.problem import Problem, predict_by_costs
from hetu_fx.plans.plan import Pipeline, Plan
from hetu_fx.plans.prediction import Prediction

FACTORS = tuple(1 << power for power in range(1, 11))
"""So many times the link between nodes, or the rows, are tried."""

_EXACT = 0.01  # predictions are not more exact than that

Groups = Sequence[tuple[int, ...]]
"""The devices of possible replicas."""


def with_reasons(plan: Plan, problem: Problem) -> Plan:
    """Return a predicted plan that says of each kind of devices that it leaves out why, and what brings them in."""
    if plan.predicted is None or plan.has_program:
        return plan
    return replace(plan, predicted=replace(plan.predicted, left_out_why=tuple(_reasons(plan, problem))))


def _reasons(plan: Plan, problem: Problem) -> Iterator[str]:
    cluster = problem.cluster
    outside = sorted((device for device in cluster.devices if plan.place(device.rank) is None), key=lambda d: d.kind)
    for kind, devices in groupby(outside, lambda device: device.kind):
        ranks = sorted((device.rank for device in devices), key=cluster.order)
        yield f"{ranks_text(ranks)} ({kind}): {_reason(plan, ranks, problem)}"


def _reason(plan: Plan, ranks: Sequence[int], problem: Problem) -> str:
    size = min(len(pipeline.devices) for pipeline in plan.pipelines)
    groups = [tuple(ranks[start : start + size]) for start in range(0, len(ranks) - size + 1, size)]
    if not groups:
        return f"too few for another replica of {size} devices"
    alone, joined = problem.fit_memory(plan), _fitting(plan, groups, problem)
    if joined is None or alone is None:
        return _lack(plan, groups[0], problem)
    before, after = alone[1], joined[1]
    if after < before * (1 + _EXACT):
        return f"with them a step takes {seconds_text(after)}, about as long as without"
    much = f"{after / before:.2g} times as long" if after > 2 * before else f"{100 * (after / before - 1):.1f} % more"
    told = f"with them a step takes {seconds_text(after)}, {much}{_what_grows(alone[0], joined[0], problem)}"
    ways = [way for way in (_link(plan, groups, problem), _rows(plan, groups, problem)) if way]
    brings = f"they pay from {' or '.join(ways)} on" if ways else "no faster link and no larger batch brings them in"
    return f"{told}; {brings}"


def _lack(plan: Plan, ranks: tuple[int, ...], problem: Problem) -> str:
    """Say why no other replica on some devices is there."""
    one = _joined(plan, [ranks], problem)
    if one is None:
        return "they would have less than a row each; a larger batch brings them in"
    needed = {device.rank: device.total_bytes for device in predict_by_costs(one, problem).devices}
    room = problem.options.memory_fraction
    limits = {rank: int(room * problem.cluster.device(rank).memory_bytes) for rank in ranks}
    worst = max(ranks, key=lambda rank: needed[rank] / limits[rank])
    if needed[worst] <= limits[worst]:
        return "another replica on them is not allowed"
    used = format_used_bytes(needed[worst], limits[worst])
    return f"another replica on them needs {used} each; more memory brings them in"


def _fitting(plan: Plan, groups: Groups, problem: Problem) -> tuple[Plan, float] | None:
    """Return the faster plan that fits with one more replica or one on each group, and its seconds."""
    made = (_joined(plan, groups[:count], problem) for count in sorted({1, len(groups)}))
    found = (problem.fit_memory(one) for one in made if one is not None)
    return min((one for one in found if one is not None), key=lambda pair: pair[1], default=None)


def _joined(plan: Plan, more: Groups, problem: Problem) -> Plan | None:
    """Return the plan with replicas like its smallest one on more devices, rows in proportion to speed; None if few."""
    shape, rows = min(plan.pipelines, key=lambda pipeline: len(pipeline.devices)), problem.costs.rows
    groups = [*(pipeline.devices for pipeline in plan.pipelines), *more]
    speeds = [sum(problem.cluster.device(rank).speed for rank in group) for group in groups]
    shares = [round(rows * speed / sum(speeds)) for speed in speeds]
    if rows < len(groups) or min(shares) < 1:
        return None
    shapes = [*plan.pipelines, *[shape] * len(more)]
    made = [_on(one, group, share) for one, group, share in zip(shapes, groups, shares, strict=True)]
    return replace(plan, pipelines=tuple(made), predicted=None)


def _on(pipeline: Pipeline, ranks: Sequence[int], share: int) -> Pipeline:
    """Return a pipeline on other devices, with a share of the rows."""
    devices = iter(ranks)
    stages = tuple(replace(stage, devices=tuple(next(devices) for _ in stage.devices)) for stage in pipeline.stages)
    return replace(pipeline, stages=stages, share=share, micro_batches=min(pipeline.micro_batches, share))


def _what_grows(plan: Plan, joined: Plan, problem: Problem) -> str:
    """Say which term of the step grows most, where any does."""
    before, after = (_most(predict_by_costs(one, problem)) for one in (plan, joined))
    grown = {term: seconds - before.get(term, 0.0) for term, seconds in after.items() if term != "idle"}
    term = max(grown, key=lambda one: grown[one], default="")
    return f" ({term.replace('_', ' ')} {seconds_text(grown[term])} more)" if term and grown[term] > 0 else ""


def _most(prediction: Prediction) -> dict[str, float]:
    """Return the most that any device spends on each term."""
    found: dict[str, float] = {}
    for device in prediction.devices:
        for term, seconds in device.seconds:
            found[term] = max(found.get(term, 0.0), seconds)
    return found


def _link(plan: Plan, groups: Groups, problem: Problem) -> str:
    """Return from which link between nodes on these devices pay; "" for none, or where there is one node."""
    now = problem.cluster.inter.bytes_per_second
    if len({device.node for device in problem.cluster.devices}) == 1:
        return ""
    factor = _least(groups, lambda k: (plan, replace(problem, cluster=problem.cluster.with_inter(now * k))))
    return "" if factor is None else f"{rate_text(8 * now * factor, 'bit/s')} between nodes"


def _rows(plan: Plan, groups: Groups, problem: Problem) -> str:
    """Return from which number of rows on these devices pay; "" for none."""
    rows = problem.costs.rows
    factor = _least(groups, lambda k: (_longer(plan, k), replace(problem, profile=problem.profile.with_rows(rows * k))))
    return "" if factor is None else f"{rows * factor} rows a step"


def _longer(plan: Plan, factor: int) -> Plan:
    """Return the plan for so many times the rows, in as many times the micro-batches."""
    made = (replace(one, micro_batches=one.micro_batches * factor) for one in plan.pipelines)
    return replace(plan, pipelines=tuple(made))


def _least(groups: Groups, changed: Callable[[int], tuple[Plan, Problem]]) -> int | None:
    """Return the least factor by which a changed problem is solved faster with some devices than without them."""

    def pays(factor: int) -> bool:
        plan, problem = changed(factor)
        alone, joined = problem.fit_memory(plan), _fitting(plan, groups, problem)
        return alone is not None and joined is not None and joined[1] < alone[1]

    return FACTORS[bisect_left(FACTORS, True, key=pays)] if pays(FACTORS[-1]) else None
