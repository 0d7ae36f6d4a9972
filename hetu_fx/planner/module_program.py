"""What planning knows of a model that cannot be captured: its parameters, and that each device runs all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from hetu_fx.base.progress import Tell, nobody
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.step import memory_problems, predict
from hetu_fx.planner.search.allocate import spread_by_speed
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan


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
