"""A captured program as planning asks about it: what a step costs, what searches ask of its graph, its best plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from hetu_fx.base.once import once
from hetu_fx.base.progress import Tell, nobody
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.graph.bind import Batch
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.count.graph_problem import GraphProblem, graph_problem_of
from hetu_fx.planner.make_plan import PlanOptions, make_plan
from hetu_fx.planner.price.step import memory_problems, predict
from hetu_fx.planner.search.allocate import spread_by_speed
from hetu_fx.planner.search.hap.played import PlayedStep
from hetu_fx.planner.search.hap.priced import played_step
from hetu_fx.planner.searches import DEFAULT
from hetu_fx.planner.simulate.simulation import Simulation
from hetu_fx.planner.values.options import ANY, Choice
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.prediction import Prediction
from hetu_fx.program.captures import Programs, example_size
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.work_shares import Split


@dataclass(frozen=True, eq=False)
class ModuleProgram:
    """A model that runs as the module it is, as planning asks about it."""

    model: nn.Module

    def costs(self, rows: int, *, memory: bool = True, negligible_bytes: float = 0.0) -> ProgramCosts:
        """Return the costs as far as parameters tell: a product and a sum with each, per row, and their bytes.

        A module that uses a parameter many times per row (for every token, say) takes more; all devices alike, so
        that shares come out right, and predicted seconds too low.
        """
        parameters = list(self.model.parameters())
        flops = 2.0 * sum(parameter.numel() for parameter in parameters)
        num_bytes = float(sum(parameter.numel() * parameter.element_size() for parameter in parameters))
        return ProgramCosts(rows, PartCosts(flops=flops, parameter_bytes=num_bytes), (), PartCosts())

    def at(self, costs: ProgramCosts) -> PlannedModule:
        """Return the model as it is planned for where a step costs this."""
        return PlannedModule(costs)


@dataclass(frozen=True, eq=False)
class PlannedModule:
    """A model that runs as the module it is, and is planned for: all that counts is what a step costs.

    Attributes:
        costs: of a step.
        splits_rows: devices share the rows; else each would run all of them, and one is as good as many.
    """

    costs: ProgramCosts
    splits_rows: bool = True

    def on_one_device(self) -> PlannedModule:
        """Return it with plans for one device each."""
        return replace(self, splits_rows=False)

    def plan(self, cluster: Cluster, name: str, *, tell: Tell = nobody) -> Plan:
        """Share the rows out so that the last device is done earliest; devices too slow for a row are left out.

        That is soon done, and tells nothing. Rows that are not shared out all go to the fastest device that has room.

        Raises `PlanError` where the whole model does not fit a device.
        """
        problems: Sequence[str] = ()
        for plan in (self._spread(cluster),) if self.splits_rows else self._alone(cluster):
            predicted = predict(plan, self.costs, cluster)
            problems = memory_problems(predicted, cluster)
            if not problems:
                return Plan(plan.pipelines, name=name, predicted=predicted)
        raise PlanError(
            f"parameters, gradients and optimizer states do not fit ({'; '.join(problems)}), and capture='eager' "
            f"has the whole model on every device\nhint: use larger devices, or make the model capturable"
        )

    def _spread(self, cluster: Cluster) -> Plan:
        shares = spread_by_speed(self.costs.rows, [device.speed for device in cluster.devices], least=0)
        assert shares is not None, "without limits every total can be shared out"
        used = [(device.rank, rows) for device, rows in zip(cluster.devices, shares, strict=True) if rows]
        return Plan.data_parallel([rank for rank, _ in used], [rows for _, rows in used])

    def _alone(self, cluster: Cluster) -> Iterator[Plan]:
        """Yield plans for one device, the fastest first; then one for all, which share the optimizer's states."""
        for device in sorted(cluster.devices, key=lambda device: -device.speed):
            yield Plan.single(device.rank)
        yield self._spread(cluster)


@dataclass(frozen=True, eq=False)
class CapturedProgram:
    """A captured program, and the size of its example batch.

    Attributes:
        program: with its graph.
        rows: of the example.
        length: of the example's sequences; 0 if it has none.
        forbidden: features that plans must not have, whatever is asked: it runs in a way that gains nothing by them.
    """

    program: Program
    rows: int
    length: int = 0
    forbidden: tuple[str, ...] = ()

    @classmethod
    def of(cls, programs: Programs, example: Batch, *, forbidden: tuple[str, ...] = ()) -> CapturedProgram:
        """Return the program for batches like an example. Raises `CaptureError` where it cannot be captured."""
        program = programs.first(example, training=True)
        if program.graph.fixed_rows is not None:  # each replica computes all of it
            forbidden = (*forbidden, "data_parallel")
        return cls(program, *example_size(example, programs, program), forbidden)

    def costs(self, rows: int | None = None, *, memory: bool = True, negligible_bytes: float = 0.0) -> ProgramCosts:
        """Return what a step of so many rows costs (left out: the example's).

        What it holds is found out only if asked (`memory`), as that takes a while, and not where it needs less than
        `negligible_bytes` on one device.
        """
        return program_costs(self.program, rows=rows or self.rows, memory=memory, negligible_bytes=negligible_bytes)

    def at(self, costs: ProgramCosts) -> PlannedProgram:
        """Return the program as it is planned for where a step costs this."""
        return PlannedProgram(self.program, costs, self.forbidden)

    def profile(self) -> Profile:
        """Return what a step of the example batch costs, as a profile that can be written."""
        return Profile(self.costs(), self.length, source="estimate", mixes_rows=self.program.mixes_rows)


@dataclass(frozen=True, eq=False)
class PlannedProgram:
    """A program that is planned for; what it is asked is worked out once.

    Attributes:
        program: with its graph.
        costs: of a step, where groups split what they choose.
        forbidden: as for `CapturedProgram`.
    """

    program: Program
    costs: ProgramCosts
    forbidden: tuple[str, ...] = ()

    @cached_property
    def hap(self) -> GraphProblem:
        """Return the program as HAP plans for it, with the rows of `costs`."""
        return graph_problem_of(self.program.analysed, rows=self.costs.rows)

    @property
    def splits(self) -> tuple[Split, ...]:
        """Return what groups may be asked to split first, besides what they would by themselves."""
        return self.program.expert_splits

    def plan(
        self,
        cluster: Cluster,
        name: str,
        search: str = DEFAULT,
        choice: Choice = ANY,
        *,
        before: Plan | None = None,
        steps_ahead: float = math.inf,
        tell: Tell = nobody,
    ) -> Plan:
        """Return the best plan for a cluster; a program that mixes rows is not cut into micro-batches or stages.

        For a job that runs `before`, getting from there to the plan counts too, spread over `steps_ahead`. Raises
        `PlanError` where none fits.
        """
        options = PlanOptions.of_program(mixes_rows=self.program.mixes_rows, name=name, choice=choice)
        return make_plan(
            self.costs,
            cluster,
            options=replace(options, forbidden=(*options.forbidden, *self.forbidden)),
            search=search,
            captured=self,
            before=before,
            steps_ahead=steps_ahead,
            tell=tell,
        )

    @once
    def expect(self, plan: Plan, cluster: Cluster) -> Prediction:
        """Return what a step under a plan with a program is expected to take.

        Raises `PlanError` or `DeductionError` for one that the passes refuse.
        """
        return self._step(plan, cluster).prediction()

    def simulate(self, plan: Plan, cluster: Cluster) -> Simulation:
        """Return a step under a plan with a program, with its timeline. Raises as `expect` does."""
        return self._step(plan, cluster).simulation()

    def _step(self, plan: Plan, cluster: Cluster) -> PlayedStep:
        return played_step(self.hap, plan, self.costs, cluster)

    def costs_of(self, split: Split, widest: int = 1) -> ProgramCosts:
        """Return what a step costs where groups, of up to `widest` devices, split these dims first.

        It is `costs` if they would anyway. Raises `PlanError` where a parameter has no such dim.
        """
        narrow = self._counted(split, larger=False)
        if widest <= narrow.units or narrow.takes(widest) or self.program.larger_work_shares(split) is None:
            return narrow
        return self._counted(split, larger=True)

    @once
    def _counted(self, split: Split, *, larger: bool) -> ProgramCosts:
        shares = self.program.larger_work_shares(split) if larger else self.program.work_shares(split)
        if shares is None or shares.classes == self.program.work_shares().classes:
            return self.costs
        has_memory = self.costs.memory is not None
        counted = program_costs(self.program, rows=self.costs.rows, shares=shares, memory=has_memory)
        return replace(counted, state=self.costs.state)
