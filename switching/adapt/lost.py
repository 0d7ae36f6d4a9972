"""Homes after devices are lost: what they held comes from others that hold the same, and all goes near another plan.

As in Hetu v2's elastic training (section 9): states are whole on each replica (zero 0), so that a replica that has lost
none of its devices has all of them. `hetu_fx.planner.search.staying` prices the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.states import Duplicate
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import by_first, together
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.plans.homes import homes_near, speeds
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.migrate.plan import SwitchPlan
from hetu_fx.switching.migrate.state_tensors import TrainingState, with_layout
from hetu_fx.switching.runtime import Runtime


def bring_near(
    runtime: Runtime, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], lost: Collection[int]
) -> SwitchPlan:
    """Bring parameters and all that belongs to them home near a plan; lost devices give nothing. Collective.

    Raises StateError, on every rank, where nobody else has what a lost device held.
    """
    table, topology = runtime.table, runtime.table.topology
    together(table, lambda: _leave_out(TrainingState(runtime.homes, optimizers), lost, table))
    shapes = {name: tuple(home.shape) for name, home in runtime.homes.items()}
    known = speeds(topology if isinstance(topology, Cluster) else None, table.size)
    weights = [0.0 if rank in lost else speed for rank, speed in enumerate(known)]
    near = by_first(table, lambda: homes_near(plan, runtime.execution.compute_annotations(plan), shapes, weights))
    return runtime.switch_home(near, optimizers, overlap=False)


def _leave_out(state: TrainingState, lost: Collection[int], table: GroupTable) -> None:
    """Forget what lost devices, and those that hold a tensor together with them, hold of it."""
    for (name, _), tensor in state.tensors.items():
        before = tensor.home_layout.annotation
        if not set(lost).isdisjoint(before.ranks):
            left = left_of(name, before, lost)
            with_layout(tensor, tensor.local if left.holds(table.rank) else None, left, table)


def left_of(name: str, home: Annotation, lost: Collection[int]) -> Annotation:
    """Return where a tensor is that was at home there, after devices are lost: the groups that have lost none.

    Raises StateError where they do not have all of it.
    """
    pairs = zip(home.groups, home.shardings, strict=True)
    whole = [(group, sharding) for group, sharding in pairs if set(lost).isdisjoint(group.ranks)]
    if not whole or not isinstance(home.top, Duplicate):
        raise StateError(
            f"devices {sorted(lost)} are lost, and nobody else has all of {name!r}, which was at home on ranks "
            f"{sorted(home.ranks)}; train with zero=0 on several replicas, or load a checkpoint"
        )
    groups, shardings = zip(*whole, strict=True)
    return Annotation(groups, shardings, Duplicate(len(groups)) if len(groups) > 1 else None)
