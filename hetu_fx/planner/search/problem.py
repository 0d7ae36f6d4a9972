"""What every search is asked, and what it says of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from hetu_fx.base.once import once
from hetu_fx.base.progress import Tell, nobody
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.fitting import fit_recompute
from hetu_fx.planner.simulate.simulate import expect, simulated_seconds
from hetu_fx.planner.values.options import PlanOptions, TimeLimit
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan
from hetu_fx.plans.prediction import Prediction

if TYPE_CHECKING:
    from hetu_fx.planner.count.graph_problem import GraphProblem
    from hetu_fx.transforms.layouts.work_shares import Split

Candidates = Mapping[Plan, float]
"""Plans and their predicted seconds, by the one cost model. Plans of one `max_length` compete with each other."""


class CapturedCosts(Protocol):
    """What only the captured graph of a program tells."""

    @property
    def hap(self) -> GraphProblem:
        """Return the program as HAP plans for it, with the rows of the problem's costs."""
        ...

    @property
    def splits(self) -> tuple[Split, ...]:
        """Return what groups may be asked to split first, besides what they would by themselves."""
        ...

    def expect(self, plan: Plan, cluster: Cluster) -> Prediction:
        """Return what a step under a plan with a program is expected to take.

        Raises `PlanError` or `DeductionError` for one that the passes refuse.
        """
        ...

    def costs_of(self, split: Split, widest: int = 1) -> ProgramCosts:
        """Return what the program costs where groups split these dims first; its costs themselves if they do anyway.

        `widest` is the size of the largest group: one that is too large for what it would cut besides leaves that
        whole. Raises `PlanError` where a parameter has no such dim.
        """
        ...


WORTH = 1.3
"""What is expected to be slower than the best plan by more than this factor is neither priced nor simulated.

Estimates were seen to be up to 1.25 times the price, and prices up to 1.14 times what a simulation says.
"""

LEAST_PRICED = 8
"""So many plans are priced whatever they are expected to take."""


@dataclass(slots=True)
class PriceTally:
    """What has been priced: how many plans that fit, the seconds of the best, and if some recompute nothing."""

    count: int = 0
    least_seconds: float = math.inf
    are_roomy: bool = False

    def add(self, seconds: float, *, is_roomy: bool = False) -> None:
        """Note a plan that fits, and whether it recomputes nothing."""
        self.count += 1
        self.are_roomy |= is_roomy
        self.least_seconds = min(self.least_seconds, seconds)

    @property
    def worth_seconds(self) -> float:
        """Return the seconds above which plans are not worth pricing; infinite while only a few have been."""
        return math.inf if self.count < LEAST_PRICED else WORTH * self.least_seconds


@dataclass(frozen=True)
class Problem:
    """A question to a search; all that it may read.

    Attributes:
        profile: what the program costs, and what is known of kinds of devices.
        cluster: the devices.
        options: what a plan may be.
        before: the plan that runs now, for searches that weigh what is moved.
        steps_ahead: for how many steps a plan is wanted; with `before`, plans compete by their steps and getting there.
        captured: answers what profiles do not tell; None where there is no graph.
        tell: told how far the search has come; takes no part in the answer.
        time_limit: when a search gives what it has.
        priced: what all searches have priced of this very problem.
    """

    profile: Profile
    cluster: Cluster
    options: PlanOptions = field(default_factory=PlanOptions)
    before: Plan | None = None
    steps_ahead: float = math.inf
    captured: CapturedCosts | None = field(default=None, compare=False)
    tell: Tell = field(default=nobody, compare=False)
    time_limit: TimeLimit = field(default_factory=TimeLimit, compare=False)
    priced: PriceTally = field(default_factory=PriceTally, init=False, compare=False)

    def __post_init__(self) -> None:
        if not self.steps_ahead > 0:
            raise PlanError(f"steps_ahead is {self.steps_ahead}\nhint: give a number above 0, or math.inf")

    @property
    def costs(self) -> ProgramCosts:
        """Return the costs of a step, for the length of rows that is planned for."""
        return self.profile.costs

    @property
    def running(self) -> Plan | None:
        """Return the plan that runs, named as plans that are found are, where getting to them counts; else None."""
        if self.before is None or self.steps_ahead == math.inf:
            return None
        named = replace(self.before, name=self.options.name, max_length=self.options.max_length, predicted=None)
        return named.with_blocks(self.costs.num_blocks)

    @property
    def thinner(self) -> Problem:
        """Return the problem with more micro-batches to choose from, so that each keeps less; 1 stays 1."""
        counts, rows = self.options.micro_batches, self.costs.rows
        doubled = (counts[-1] << i for i in range(1, rows.bit_length()))
        more = tuple(count for count in doubled if counts[-1] > 1 and count <= rows)
        return replace(self, options=replace(self.options, micro_batches=counts + more))

    def plan(self, pipelines: Iterable[Pipeline]) -> Plan:
        """Return the plan of these pipelines, as the options have it."""
        given = self.options
        return Plan(tuple(pipelines), given.schedule, given.zero, given.name, given.max_length)

    def costs_of(self, plan: Plan) -> ProgramCosts:
        """Return the costs of a step for what the plan's groups split; without a graph, as if it did not say."""
        if self.captured is None or not plan.split:
            return self.costs
        return self.captured.costs_of(plan.split, widest(plan))

    @once
    def fit_memory(self, plan: Plan) -> tuple[Plan, float] | None:
        """Return a plan, with the least recompute that fits memory, and its predicted seconds; None if none fits.

        None too for one with what plans must not have.
        """
        costs = self.costs_of(plan)
        found = fit_recompute(plan.with_blocks(costs.num_blocks), costs, self.cluster, self.options)
        if found is None or self.options.refused(found.plan):
            return None
        seconds = found.overlapped_seconds
        self.priced.add(seconds, is_roomy=not found.plan.recomputes)
        return found.plan, seconds


def widest(plan: Plan) -> int:
    """Return the devices of a plan's largest tensor parallel group; 1 where there is none."""
    return max(len(stage.devices) // stage.context for *_, stage in plan.stages)


def predict_by_costs(plan: Plan, problem: Problem) -> Prediction:
    """Predict a plan's step, simulated, for rows of the length that the problem's costs hold for.

    One with a program is not simulated, but priced from the captured graph. Raises `PlanError` where there is none.
    """
    if plan.has_program:
        return _of_program(plan, problem)
    return expect(plan, problem.costs_of(plan), problem.cluster)


def seconds_by_costs(plan: Plan, problem: Problem) -> float:
    """Return what a plan's step is predicted to take, as `predict_by_costs` does."""
    if plan.has_program:
        return _of_program(plan, problem).seconds
    return simulated_seconds(plan, problem.costs_of(plan), problem.cluster)


def _of_program(plan: Plan, problem: Problem) -> Prediction:
    if problem.captured is None:
        raise PlanError(
            "a plan with a program is priced op by op, for which the captured graph is needed, which profiles do not "
            "hold\nhint: use hetu_fx.plan(model, batch), or leave the program out"
        )
    return problem.captured.expect(plan, problem.cluster)


def always(problem: Problem) -> bool:
    """Suit any problem."""
    return True


@dataclass(frozen=True, slots=True)
class Search:
    """One way to find plans.

    Attributes:
        name: how users call it.
        applies: when it is worth asking, in a line.
        lacks: says what a problem lacks for it, and a hint; empty when nothing.
        find: returns plans, priced; none when none fits.
        predict: says what a plan that was found is expected to cost.
        simulates: tells whether the finalists are ranked by simulating them, which `predict` does then too.
    """

    name: str
    applies: str
    lacks: Callable[[Problem], str]
    find: Callable[[Problem], Candidates]
    predict: Callable[[Plan, Problem], Prediction] = predict_by_costs
    simulates: Callable[[Problem], bool] = always


def in_all_splits(find: Callable[[Problem], Candidates]) -> Callable[[Problem], Candidates]:
    """Return a search that finds plans for each way to split a captured program.

    By themselves groups split what spreads most work for least communication, inside of experts their width. Whole
    experts can be spread instead, which moves as much, leaves rows uncut, and has other parts: more where there are
    many narrow experts, so that unlike devices end together; and more than there are heads, which larger groups leave
    whole. The search is asked again for what the program costs then.
    """

    def found_in_all(problem: Problem) -> Candidates:
        found = dict(find(problem))
        captured = problem.captured
        if captured is None or not problem.options.tensor_parallel or "experts" in problem.options.off:
            return found
        for split in captured.splits:
            for costs in _costs_of(split, captured, len(problem.cluster.devices)):
                if problem.time_limit.ends(found):
                    return found
                profile = replace(problem.profile, costs=costs)
                plans = find(replace(problem, profile=profile, captured=None))
                asked = {replace(plan, split=split): seconds for plan, seconds in plans.items() if widest(plan) > 1}
                found |= {plan: seconds for plan, seconds in asked.items() if problem.costs_of(plan) is costs}
        return found

    return found_in_all


def _costs_of(split: Split, captured: CapturedCosts, most: int) -> Iterator[ProgramCosts]:
    """Yield the costs for groups of up to `most` devices: those that split more besides, and larger ones."""
    narrow = captured.costs_of(split)
    yield narrow
    larger = captured.costs_of(split, narrow.units + 1)
    if narrow.units < most and larger is not narrow:
        yield larger
