"""Plan without running: what `auto_parallelize(plan="auto")` would choose, on devices that need not be there.

`profile` writes down what planning needs to know of a model, so that the rest can be done elsewhere, without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hetu_fx.comm_ops.groups import GroupTable
from hetu_fx.planner.profile_file import Profile
from hetu_fx.planner.search.table import DEFAULT
from hetu_fx.plans import Plan
from hetu_fx.switching.agreement import from_first
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.programs import Batch, Programs
from hetu_fx.topology import Cluster


def plan(
    model: nn.Module,
    batch: Batch,
    *,
    cluster: Cluster | str | Path | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    name: str = "auto",
    search: str = DEFAULT,
) -> Plan:
    """Return the fastest plan that fits for training `model` on a cluster; nothing is run or changed.

    Write it with `Plan.write`, edit it, give it to `auto_parallelize(plan=...)`, or read it by `print(plan.explain())`.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: an example of the whole batch of a step, of all devices together; its values are not read.
        cluster: the devices, or the path of a cluster file; None measures the processes of this job (collective).
        loss_fn: as for `auto_parallelize`.
        name: the plan's name.
        search: how to search, one of docs/planning.md; those that answer with one plan.

    Raises:
        CaptureError: the model cannot be captured.
        PlanError: no plan fits the memory of the devices, or the search lacks something.
        ClusterError: a malformed cluster file.
    """
    execution = GraphExecution(Programs(model, loss_fn), batch, None)
    costs = execution.costs(execution.example_rows)
    if cluster is None:
        table = GroupTable()
        costs, cluster = from_first(table, costs), Cluster.measure(table)
    return execution.plan(costs, cluster if isinstance(cluster, Cluster) else Cluster.read(cluster), name, search)


def profile(
    model: nn.Module,
    batch: Batch,
    *,
    more: Sequence[Batch] = (),
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Profile:
    """Return what a training step of `model` costs, counted from its captured graph; nothing is run or changed.

    Write it with `Profile.write` and plan from the file: `hetu-fx plan --profile p.json --cluster c.json`.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: an example of the whole batch of a step, of all devices together; its values are not read.
        more: batches with rows of other lengths, for searches that plan by length; each is captured.
        loss_fn: as for `auto_parallelize`.

    Raises:
        CaptureError: the model cannot be captured.
        ProfileError: two batches have rows of one length.
    """
    whole, *others = (GraphExecution(Programs(model, loss_fn), one, None).profile() for one in (batch, *more))
    lengths = tuple((other.tokens_per_row, other.costs) for other in others)
    return replace(whole, other_lengths=lengths).with_rows(whole.costs.rows)
