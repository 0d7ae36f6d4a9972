"""Split collectives on the wire: every rank runs its groups in the one order that all ranks keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.plans.algorithm import FLAT, Form
from hetu_fx.comm_ops.plans.choose_algorithm import ChooseForm, nodes_of
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.plans.slices import Dims
from hetu_fx.comm_ops.plans.split_plan import SliceGroup, groups_of, slice_groups
from hetu_fx.comm_ops.plans.transition import Change, parse_change
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.packing import check_local, local_dims, local_shape_like, read, slice_shape, write
from hetu_fx.comm_ops.wire.two_level import gather_in_form, reduce_in_form, sum_in_form


def reduce_slices(x: Tensor, change: Change, form: Form, table: GroupTable) -> Tensor:
    """Sum over the groups of a union: partial top to duplicate top."""
    check_local(x, change.source, table.rank, change.shape, "a split collective")
    result = result_like(x, change, table.rank)
    for group in groups_of(change, table.rank):
        # Read from x, not from result: a rank may be in several groups for one slice.
        summand = take(x, change.source, change, group.parts[0], table.rank)
        total = sum_in_form(summand, group.ranks, form.within(change.ranks, group.ranks), table)
        put(result, change.target, change, group.parts[0], table.rank, total)
    return result


def gather_slices(x: Tensor, change: Change, form: Form, table: GroupTable) -> Tensor:
    """Join over the groups of a union: split top to duplicate top."""
    check_local(x, change.source, table.rank, change.shape, "a split collective")
    result = result_like(x, change, table.rank)
    for group in groups_of(change, table.rank):
        shapes = [[_numel(part, change, x)] for part in group.parts]
        flat = take(x, change.source, change, _own_part(group, table.rank), table.rank)
        flats = gather_in_form(flat, shapes, group.ranks, form.within(change.ranks, group.ranks), table)
        for flat, part in zip(flats, group.parts, strict=True):
            put(result, change.target, change, part, table.rank, flat)
    return result


def scatter_slices(x: Tensor, change: Change, form: Form, table: GroupTable) -> Tensor:
    """Sum over the groups of a union, each keeping its part: partial top to split top."""
    check_local(x, change.source, table.rank, change.shape, "a split collective")
    result = result_like(x, change, table.rank)
    for group in groups_of(change, table.rank):
        flats = [take(x, change.source, change, part, table.rank) for part in group.parts]
        total = reduce_in_form(flats, group.ranks, form.within(change.ranks, group.ranks), table)
        put(result, change.target, change, _own_part(group, table.rank), table.rank, total)
    return result


def form_of_slices(of_group: ChooseForm) -> ChooseForm:
    """Give the choice of a split collective's form: that of its largest group that gains from two levels."""

    def choose(args: Sequence[Any], topology: Topology, choice: str) -> Form:
        change = parse_change(args[0])
        forms = [(group, of_group((group.ranks,), topology, choice)) for group in slice_groups(change)]
        bounds = [(group.numel, form.two_level_from) for group, form in forms if form.two_level_from is not None]
        if not bounds:
            return FLAT
        return Form(nodes_of(change.ranks, topology), max(bounds)[1])

    return choose


def _own_part(group: SliceGroup, rank: int) -> tuple[Dims, ...]:
    """Give the slices of `rank` in a group."""
    return group.parts[group.ranks.index(rank)]


def result_like(x: Tensor, change: Change, rank: int) -> Tensor:
    """Give an empty tensor for this rank's part after the change."""
    return x.new_empty(local_shape_like(change.target, rank, change.shape, x))


def take(x: Tensor, annotation: Annotation, change: Change, part: Sequence[Dims], rank: int) -> Tensor:
    """Lay slices of a local tensor end to end."""
    flats = [read(x.detach(), local_dims(annotation, rank, change.shape, dims)).reshape(-1) for dims in part]
    return torch.cat(flats) if flats else x.new_empty(0)


def put(x: Tensor, annotation: Annotation, change: Change, part: Sequence[Dims], rank: int, flat: Tensor) -> None:
    """Write slices that lie end to end into a local tensor."""
    offset = 0
    for dims in part:
        shape = slice_shape(dims, change.shape, x)
        value = flat.narrow(0, offset, torch.Size(shape).numel()).view(shape)
        write(x, local_dims(annotation, rank, change.shape, dims), value)
        offset += value.numel()


def _numel(part: Sequence[Dims], change: Change, like: Tensor) -> int:
    return sum(torch.Size(slice_shape(dims, change.shape, like)).numel() for dims in part)
