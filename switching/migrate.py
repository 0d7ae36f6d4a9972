"""Carries out a change of home: every tensor of the training state to its new owners, in place and bit by bit.

Parameters, gradients and optimizer state stay the same objects, so the user's optimizers, schedulers and loops need
not know. Nothing goes through a file. A rank that fails in a bucket fails on all ranks before anything of the bucket is
changed; what earlier buckets brought over stays, and the next change of home starts from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.bsr_run import Messages, examples_of, prepare, send, unpack
from hetu_fx.comm_ops.groups import GroupTable, using
from hetu_fx.errors import StateError
from hetu_fx.switching.agreement import together
from hetu_fx.switching.gradients import layout_of
from hetu_fx.switching.home import HomeTensor
from hetu_fx.switching.home_layout import home_layout
from hetu_fx.switching.home_parameters import move_optimizer_state
from hetu_fx.switching.state_tensors import Homes, TrainingState, with_layout
from hetu_fx.switching.switch_plan import EXTRA_SHARE, SwitchBucket, SwitchPlan, plan_switch


@torch.no_grad()
def migrate(
    homes: Homes,
    targets: Mapping[str, Annotation],
    optimizers: Sequence[torch.optim.Optimizer],
    table: GroupTable,
    *,
    extra_share: float = EXTRA_SHARE,
) -> SwitchPlan:
    """Bring home parameters, their gradients and all that `optimizers` keep of them to other ranks; collective.

    Args:
        homes: the home parameters by name.
        targets: where they are to go, by name; the others stay. The same on all ranks.
        optimizers: all that hold state for them. Plain tensors of a parameter's shape are cut to its home.
        table: the ranks.
        extra_share: see `plan_switch`.

    Returns the plan that was carried out.

    Raises:
        StateError: on every rank, if the ranks' states do not fit together or one rank failed.
        CommError: a peer is dead.
    """
    with using(table):
        state = together(table, lambda: _checked(homes, targets, optimizers, table))
        tensors = state.agreed(targets, table)
        node_of = (lambda rank: 0) if table.topology is None else table.topology.node_of
        plan = together(table, lambda: plan_switch(tensors, table.size, node_of=node_of, extra_share=extra_share))
        for bucket in plan.buckets:
            _carry_out(bucket, state, table)
    # A number beside a parameter without dims may be a count, which is whole everywhere.
    layouts = {name: layout_of(home) for name, home in homes.items() if home.dim()}
    for optimizer in optimizers:
        move_optimizer_state(optimizer, {name: homes[name] for name in layouts}, layouts)
    return plan


def _checked(
    homes: Homes, targets: Mapping[str, Annotation], optimizers: Sequence[torch.optim.Optimizer], table: GroupTable
) -> TrainingState:
    strangers = sorted(set(targets) - set(homes))
    if strangers:
        raise StateError(f"homes are given for {strangers}, which are none of the parameters {sorted(homes)}")
    for name, target in targets.items():
        home_layout(target, tuple(homes[name].shape), table.rank, table.size)  # raises what is wrong with it
    return TrainingState(homes, optimizers)


def _carry_out(bucket: SwitchBucket, state: TrainingState, table: GroupTable) -> None:
    """Bring one bucket over: packed on all ranks or on none, and put together on all or on none."""
    held = [state.tensors[tensor.parameter, tensor.kind] for tensor in bucket.tensors]
    parts = [
        home.local if tensor.source.holds(table.rank) else None
        for tensor, home in zip(bucket.tensors, held, strict=True)
    ]
    like = [home.local for home in held]

    def packed() -> Messages:
        return prepare(bucket.moves, table, examples_of(bucket.moves, parts, like, table.rank), parts)

    arrived = send(together(table, packed), table)
    made = together(table, lambda: unpack(bucket.moves, table.rank, parts, like, arrived))
    _take_over(bucket, held, made, table)


def _take_over(
    bucket: SwitchBucket, held: Sequence[HomeTensor], made: Sequence[Tensor | None], table: GroupTable
) -> None:
    for tensor, home, piece in zip(bucket.tensors, held, made, strict=True):
        with_layout(home, piece if tensor.target.holds(table.rank) else None, tensor.target, table)
