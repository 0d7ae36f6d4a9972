"""The searches that there are: a new one is a file in `search` and a line here. `auto` asks those that suit.

The homogeneous search is always asked, so that no answer is worse than its plan by the cost of all searches: after that
by classes, which leaves it what is near the best of these, but first where time is limited. Where devices differ (in
kind, rate or memory) those for unlike devices are asked too, that for kinds together with that by classes, which ask
for the same regions; where a few do, programs are asked for op by op, if the model has no repeated blocks, or they are
allowed and what was found leaves much to gain; where the sequences of a batch differ and one search plans by length,
its plans are the answer. The one cost says whose plan is best.

Replicas that share what they read: gradients go home as they come, parameters are gathered unit by unit (zero 2, 3).
That costs time, and saves memory. So it is asked for where a plan of one stage and one micro-batch does not fit memory
otherwise, or not without recomputing: more of `zero` only where less of it does so, too (Rajbhandari et al., ZeRO, SC
2020, section 5; Zhao et al., PyTorch FSDP, VLDB 2023). Replicas are groups of equal size, with rows by their speed, or
equal ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

from hetu_fx.base.documents import nearest
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.step import bound_seconds
from hetu_fx.planner.search.cluster_regions import CLASSES
from hetu_fx.planner.search.contiguous import CONTIGUOUS
from hetu_fx.planner.search.heteroauto.adapter import HETEROAUTO, KINDS
from hetu_fx.planner.search.homogeneous import HOMOGENEOUS, orders
from hetu_fx.planner.search.hydraulis.adapter import HYDRAULIS
from hetu_fx.planner.search.malleus.adapter import MALLEUS
from hetu_fx.planner.search.mending import RAGGED
from hetu_fx.planner.search.problem import Candidates, Problem, Search, always, in_all_splits
from hetu_fx.planner.search.templates import device_classes
from hetu_fx.plans.homes import largest_remainder
from hetu_fx.plans.plan import ZERO, Pipeline, Plan, Stage
from hetu_fx.plans.prediction import Prediction


def _find(problem: Problem) -> Candidates:
    problem.tell("sharded: replicas that share gradients and parameters")
    found = dict[Plan, float]()
    for plan in dict.fromkeys(_replicas(problem)):
        for zero in (zero for zero in ZERO if zero):
            asked = replace(plan, zero=zero)
            priced = problem.fit_memory(asked) if asked.zero_in_effect == zero else None
            if priced is not None:
                found |= [priced] if zero > 1 else []
                if not priced[0].recomputes:
                    break
    return found


def _replicas(problem: Problem) -> Iterator[Plan]:
    """Yield plans of replicas of one stage over all devices."""
    cluster, costs, options = problem.cluster, problem.costs, problem.options
    count = len(cluster.devices)
    for size, order in itertools.product(costs.group_sizes(count if options.tensor_parallel else 1), orders(cluster)):
        groups = [order[start : start + size] for start in range(0, count - size + 1, size)]
        speeds = [sum(cluster.device(rank).speed for rank in group) for group in groups]
        for shares in (largest_remainder(costs.rows, speeds), [1] * len(groups)):
            if min(shares) and sum(shares) <= costs.rows:
                pairs = zip(groups, shares, strict=True)
                yield problem.plan(Pipeline((Stage(group),), share=share) for group, share in pairs)


SHARDED = Search(
    name="sharded",
    applies="replicas that do not fit memory with whole gradients and parameters: zero 2 and 3, rows by speed",
    lacks=lambda problem: "" if problem.options.zero else "plans keep states whole (zero 0)",
    find=in_all_splits(_find),
)


_SMALL = 6  # devices of a cluster whose runs are gone through one by one within seconds, whatever they are
_FEW = 16  # devices of a cluster whose unlike devices may be worth grouping as if some of them straggled
_LARGE = 512  # devices of a cluster of several kinds that is searched for more than equal pipelines within seconds


@dataclass(frozen=True, slots=True)
class SearchRule:
    """A search, and what it is asked for."""

    search: Search
    suits: Callable[[Problem], bool]

    def asks(self, problem: Problem) -> bool:
        """Tell whether the search is asked: it suits and lacks nothing."""
        return self.suits(problem) and not self.search.lacks(problem)


def _of_graphs(name: str, applies: str, function: str) -> Search:
    """Return a search for captured models; what reads graphs is imported when it is asked, and torch then."""

    def find(problem: Problem) -> Candidates:
        found: Candidates = getattr(import_module("hetu_fx.planner.search.hap.adapter"), function)(problem)
        return found

    return Search(name, applies, _lacks_a_graph, find)


def _lacks_a_graph(problem: Problem) -> str:
    if problem.captured is not None:
        return ""
    return (
        "it plans op by op and needs the captured graph, which profiles do not hold\n"
        "hint: use hetu_fx.plan(model, batch, search='hap'), or for a profile 'auto', 'homogeneous', 'classes' or "
        "'contiguous'"
    )


HAP = _of_graphs(
    "hap",
    "captured models, any: rows or parts of the widths that pay, op by op, in proportion to the devices' speeds",
    "find_plans",
)
PROGRAMS = _of_graphs("programs", "captured models, any: the plans of `hap` that carry its program", "find_programs")


def _devices_differ(problem: Problem) -> bool:
    """Tell whether there are devices of unlike kind, speed or memory."""
    return len(device_classes(problem)) > 1


def _is_up_to(most: int, problem: Problem) -> bool:
    return len(problem.cluster.devices) <= most


def _kinds_mix(problem: Problem) -> bool:
    """Tell whether there are devices of several kinds, few enough to be searched for more than equal pipelines."""
    return len({device.kind for device in problem.cluster.devices}) > 1 and _is_up_to(_LARGE, problem)


def some_straggle(problem: Problem, *, or_up_to: int) -> bool:
    """Tell whether devices are unlike, and some slower than they should be or there are no more than so many."""
    straggles = any(device.rate > 1.0 for device in problem.cluster.devices)
    return _devices_differ(problem) and (straggles or _is_up_to(or_up_to, problem))


def _has_no_blocks_for_few(problem: Problem) -> bool:
    """Tell whether a program has no repeated blocks, and a few devices are unlike."""
    return not problem.costs.num_blocks and _is_up_to(_SMALL, problem) and _devices_differ(problem)


def _may_share(problem: Problem) -> bool:
    """Tell whether several devices may share gradients or parameters, and may need to, or have to."""
    must = "whole_gradients" in problem.options.forbidden
    return must or len(problem.cluster.devices) > 1


def _lengths_differ(problem: Problem) -> bool:
    """Tell whether batches have sequences of several lengths."""
    return len([length for length, count in problem.profile.sequences.items() if count > 0]) > 1


_ROOM = 1.1  # what is so much slower than any plan must be may be mended op by op


def _may_gain_by_a_program(problem: Problem) -> bool:
    """Tell whether there are a few unlike devices, and what was found is far from what they could do together."""
    if not problem.options.programs or not _is_up_to(_SMALL, problem) or not _devices_differ(problem):
        return False
    return problem.priced.least_seconds > _ROOM * bound_seconds(problem.costs, problem.cluster.devices)


def auto(by_length: Search, rules: Sequence[SearchRule]) -> Search:
    """Return the search that asks all of these that are asked, or, where lengths differ, the one that plans by them."""
    lengths = SearchRule(by_length, _lengths_differ)

    def find(problem: Problem) -> Candidates:
        if lengths.asks(problem):
            return by_length.find(problem)
        found: dict[Plan, float] = {}
        asked = [rule for rule in rules if rule.asks(problem)]
        if problem.options.seconds is not None:  # what is found first is what is known when time is over
            asked.sort(key=lambda rule: rule.search is not HOMOGENEOUS)
        for rule in asked:
            if problem.time_limit.ends(found):
                break
            found |= rule.search.find(problem)
        return found

    def predict(plan: Plan, problem: Problem) -> Prediction:
        asked = by_length if lengths.asks(problem) else rules[0].search
        return asked.predict(plan, problem)

    return Search(
        name="auto",
        applies="always, and unless another is named: asks those that suit what differs in devices and sequences",
        lacks=lambda problem: "",
        find=find,
        predict=predict,
        simulates=lambda problem: by_length.simulates(problem) if lengths.asks(problem) else True,
    )


AUTO = auto(
    HYDRAULIS,
    (
        SearchRule(KINDS, _kinds_mix),
        SearchRule(CLASSES, lambda problem: not _kinds_mix(problem) or bool(KINDS.lacks(problem))),
        SearchRule(HOMOGENEOUS, always),
        SearchRule(RAGGED, partial(_is_up_to, _LARGE)),
        SearchRule(CONTIGUOUS, partial(_is_up_to, _SMALL)),
        SearchRule(MALLEUS, partial(some_straggle, or_up_to=_FEW)),
        SearchRule(SHARDED, _may_share),
        SearchRule(HAP, _has_no_blocks_for_few),
        SearchRule(PROGRAMS, lambda problem: problem.costs.num_blocks > 0 and _may_gain_by_a_program(problem)),
    ),
)

SEARCHES: Mapping[str, Search] = {
    search.name: search
    for search in (AUTO, HOMOGENEOUS, CLASSES, RAGGED, CONTIGUOUS, MALLEUS, HETEROAUTO, HYDRAULIS, SHARDED, HAP)
}

DEFAULT = AUTO.name


def find_search(name: str) -> Search:
    """Return the search of a name; raises `PlanError` with the names that there are."""
    if name not in SEARCHES:
        raise PlanError(f"unknown search {name!r}{nearest(name, tuple(SEARCHES))}")
    return SEARCHES[name]
