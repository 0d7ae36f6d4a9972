"""Plans are tried before they train; what was found is the same on every rank, where all ask together."""

from __future__ import annotations

from collections.abc import Callable

from hetu_fx.comm_ops.wire.consensus import by_first
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.plans.plan import Plan

TryPlan = Callable[[Plan], str]
"""Tries a plan on this rank alone, and returns what was found; raises CheckError where the plan is wrong."""

NOT_TRIED = "not checked: check=False"


class TriedPlans:
    """What was found of each plan.

    Args:
        table: all ranks.
        try_plan: how a plan is tried, asked on rank 0 only; None: none is.
    """

    def __init__(self, table: GroupTable, try_plan: TryPlan | None) -> None:
        self._table, self._try = table, try_plan
        self._found: dict[Plan, str] = {}

    def ask(self, plan: Plan) -> str:
        """Try a plan on rank 0, and return on every rank what was found; collective.

        Raises:
            CheckError: on every rank, where the plan does not give what one device gives.
        """
        if self._try is None:
            return NOT_TRIED
        if plan not in self._found:
            self._found[plan] = by_first(self._table, lambda: self.ask_here(plan))
        return self._found[plan]

    def ask_here(self, plan: Plan) -> str:
        """Try a plan on this rank, which no other rank hears of; raises as `ask` does."""
        return NOT_TRIED if self._try is None else self._try(plan)

    def note(self, plan: Plan, found: str) -> None:
        """Know what was found of a plan, as all ranks have been told."""
        self._found[plan] = found

    def found(self, plan: Plan) -> str:
        """Return what was found of a plan; that it was not tried, where nothing was."""
        return self._found.get(plan, NOT_TRIED)
