"""Plans are tried before they train; what was found is the same on every rank, where all ask together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetu_fx.comm_ops.wire.consensus import broadcast_from_rank0
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.eager.row_mode import NOT_KNOWN, RowMode


@dataclass(frozen=True)
class TrialResult:
    """What was found when a plan was tried.

    Attributes:
        says: that, or why it was not tried, in words.
        mode: of a module that runs as it is: how its replicas share a batch under the plan.
    """

    says: str
    mode: RowMode = NOT_KNOWN


TryPlan = Callable[[Plan], TrialResult]
"""Tries a plan on this rank alone, and returns what was found; raises CheckError where the plan is wrong."""

NOT_TRIED = TrialResult("not checked: check=False")


class TriedPlans:
    """What was found of each plan.

    Args:
        table: all ranks.
        try_plan: how a plan is tried, asked on rank 0 only; None: none is.
        untried: what is to be said of a plan that was not tried.
    """

    def __init__(self, table: GroupTable, try_plan: TryPlan | None, untried: TrialResult = NOT_TRIED) -> None:
        self._table, self._try, self._untried = table, try_plan, untried
        self._found: dict[Plan, TrialResult] = {}

    @property
    def all_by_rows(self) -> bool:
        """Tell whether replicas of a module run their own rows under every plan that was asked for."""
        return all(found.mode.by_rows for found in self._found.values() or [self._untried])

    def ask(self, plan: Plan) -> TrialResult:
        """Try a plan on rank 0, and return on every rank what was found; collective.

        Raises:
            CheckError: on every rank, where the plan does not give what one device gives.
        """
        if self._try is None:
            return self._untried
        if plan not in self._found:
            self._found[plan] = broadcast_from_rank0(self._table, lambda: self.try_on_this_rank(plan))
        return self._found[plan]

    def try_on_this_rank(self, plan: Plan) -> TrialResult:
        """Try a plan on this rank, which no other rank hears of; raises as `ask` does."""
        return self._untried if self._try is None else self._try(plan)

    def note(self, plan: Plan, found: TrialResult) -> None:
        """Know what was found of a plan, as all ranks have been told."""
        self._found[plan] = found

    def found(self, plan: Plan) -> TrialResult:
        """Return what was found of a plan; that it was not tried, where nothing was."""
        return self._found.get(plan, self._untried)
