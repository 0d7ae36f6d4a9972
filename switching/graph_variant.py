"""A plan made ready to run as graphs."""

from __future__ import annotations

from collections.abc import Mapping

from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.switching.step.compiled_plans import GraphCompute, StagePlan
from hetu_fx.switching.step.variant import Variant


class GraphVariant(Variant):
    """A plan, and the device graphs of its compute layout."""

    compute: GraphCompute

    def __init__(self, name: str, plan: Plan, compute: GraphCompute, planned_rates: Mapping[int, float]) -> None:
        super().__init__(name, plan, compute, planned_rates)
        self.compute = compute

    def stage(self, program: Program, wants_values: bool, *, splits: bool = False) -> StagePlan:
        """Return the program under this plan; collective where it has to be made.

        With `splits`, pipelines have several micro-batches, whatever the plan says.
        """
        known = self.compute.known(program, wants_values, splits)
        if known is not None:
            return known
        with self.first_use.making():
            return self.compute.made(program, wants_values, splits)
