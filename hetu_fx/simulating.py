"""Simulate without running: what a step of a model under a plan would be, on devices that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.simulate.result import Simulation
from hetu_fx.planner.simulate.schedules import PaperSchedule
from hetu_fx.planner.simulate.simulate import simulate as simulate_step
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Batch, Programs
from hetu_fx.switching.graph_execution import GraphExecution


def simulate(
    model: nn.Module,
    batch: Batch,
    plan: Plan | str | Path,
    cluster: Cluster | str | Path,
    *,
    schedule: PaperSchedule | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Simulation:
    """Return what a training step would be: seconds, bubbles, bytes per link, memory over time, and a timeline of it.

    Nothing is run or changed. Draw it with `.timeline.write_png` or
    `hetu_fx.planner.simulate.timeline_html.write_html`, or open what `.timeline.write_chrome` writes in Perfetto.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: an example of the whole batch of a step, of all devices together; its values are not read.
        plan: a plan, or the path of a plan file.
        cluster: the devices, with the rates at which they work now, or the path of a cluster file.
        schedule: in place of the plan's, also one that only a simulation can run
            (`hetu_fx.planner.simulate.schedules`).
        loss_fn: as for `auto_parallelize`.

    Raises:
        CaptureError: the model cannot be captured.
        PlanError: the plan does not fit the model or the schedule, or is no plan file.
        ClusterError: a malformed cluster file, or one that lacks a device of the plan.
    """
    execution = GraphExecution(Programs(model, loss_fn), batch, None)
    read = plan if isinstance(plan, Plan) else Plan.read(plan)
    devices = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    return simulate_step(read, execution.costs(execution.example_rows), devices, schedule=schedule)
