"""Plan without running: what `auto_parallelize(plan="auto")` would choose, on devices that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetu_fx.comm_ops.groups import GroupTable
from hetu_fx.plans import Plan
from hetu_fx.switching.agreement import from_first
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.programs import Programs
from hetu_fx.topology import Cluster


def plan(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple[Any, ...],
    *,
    cluster: Cluster | str | Path | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    name: str = "auto",
) -> Plan:
    """Return the fastest plan that fits for training `model` on a cluster; nothing is run or changed.

    Write it with `Plan.write`, edit it, give it to `auto_parallelize(plan=...)`, or read it by `print(plan.explain())`.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: an example of the whole batch of a step, of all devices together; its values are not read.
        cluster: the devices, or the path of a cluster file; None measures the processes of this job (collective).
        loss_fn: as for `auto_parallelize`.
        name: the plan's name.

    Raises:
        CaptureError: the model cannot be captured.
        PlanError: no plan fits the memory of the devices.
        ClusterError: a malformed cluster file.
    """
    execution = GraphExecution(Programs(model, loss_fn), batch, None)
    costs = execution.costs(execution.example_rows)
    if cluster is None:
        table = GroupTable()
        costs, cluster = from_first(table, costs), Cluster.measure(table)
    return execution.plan(costs, cluster if isinstance(cluster, Cluster) else Cluster.read(cluster), name)
