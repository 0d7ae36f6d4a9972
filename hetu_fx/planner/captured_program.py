"""What searches ask of a program's captured graph: how HAP sees it, and what other splits of it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.search.hap.from_graph import problem_of
from hetu_fx.planner.search.hap.problem import Problem
from hetu_fx.planner.search.problem import Split
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.tensor_cut import tensor_cut


@dataclass(frozen=True, eq=False)
class PlannedProgram:
    """A program that is planned for; what it is asked is worked out once.

    Attributes:
        program: with its graph.
        costs: of a step, where groups split what they choose.
    """

    program: Program
    costs: ProgramCosts
    _known: dict[Split, ProgramCosts] = field(default_factory=dict)

    @cached_property
    def hap(self) -> Problem:
        """Return the program as HAP plans for it, with the rows of `costs`."""
        return problem_of(self.program.graph, rows=self.costs.rows)

    def costs_of(self, split: Split) -> ProgramCosts:
        """Return what a step costs where groups split these dims first; `costs` if they would anyway.

        Raises `PlanError` where a parameter has no such dim.
        """
        if split not in self._known:
            self._known[split] = self._counted(split)
        return self._known[split]

    def _counted(self, split: Split) -> ProgramCosts:
        program = self.program
        cut = tensor_cut(program.graph, program.factors, program.flow, split)
        if cut.classes == program.tensor_cut.classes:
            return self.costs
        has_memory, summed = self.costs.memory is not None, program.summed_over_rows
        return program_costs(program.graph, rows=self.costs.rows, cut=cut, memory=has_memory, summed_over_rows=summed)
