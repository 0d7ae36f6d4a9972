"""Split collectives on the wire: every rank runs its groups in the one order that all ranks keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.local import take_slice, write
from hetu_fx.comm_ops.plans.algorithm import FLAT, Algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import ChooseAlgorithm, number_nodes
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.plans.routes import SliceGroup, collectives_of_rank, slice_groups
from hetu_fx.comm_ops.plans.slices import Dims
from hetu_fx.comm_ops.plans.transition import Transition, parse_transition
from hetu_fx.comm_ops.wire.algorithms import Collectives
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.packing import check_local, local_dims, local_shape_like, slice_shape


def reduce_slices(x: Tensor, transition: Transition, algorithm: Algorithm, table: GroupTable) -> Tensor:
    """Sum over the groups of a union: partial top to duplicate top."""
    check_local(x, transition.source, table.rank, transition.shape, "a split collective")
    result = result_like(x, transition, table.rank)
    for group in collectives_of_rank(transition, table.rank):
        # Read from x, not from result: a rank may be in several groups for one slice.
        summand = take(x, transition.source, transition, group.parts[0], table.rank)
        total = _within(group, transition, algorithm, table).sum(summand).wait()
        write_slices(result, transition.target, transition, group.parts[0], table.rank, total)
    return result


def gather_slices(x: Tensor, transition: Transition, algorithm: Algorithm, table: GroupTable) -> Tensor:
    """Join over the groups of a union: split top to duplicate top."""
    check_local(x, transition.source, table.rank, transition.shape, "a split collective")
    result = result_like(x, transition, table.rank)
    for group in collectives_of_rank(transition, table.rank):
        shapes = [[_numel(part, transition, x)] for part in group.parts]
        flat = take(x, transition.source, transition, _own_part(group, table.rank), table.rank)
        flats = _within(group, transition, algorithm, table).gather(flat, shapes).wait()
        for flat, part in zip(flats, group.parts, strict=True):
            write_slices(result, transition.target, transition, part, table.rank, flat)
    return result


def scatter_slices(x: Tensor, transition: Transition, algorithm: Algorithm, table: GroupTable) -> Tensor:
    """Sum over the groups of a union, each keeping its part: partial top to split top."""
    check_local(x, transition.source, table.rank, transition.shape, "a split collective")
    result = result_like(x, transition, table.rank)
    for group in collectives_of_rank(transition, table.rank):
        flats = [take(x, transition.source, transition, part, table.rank) for part in group.parts]
        total = _within(group, transition, algorithm, table).scatter(flats).wait()
        write_slices(result, transition.target, transition, _own_part(group, table.rank), table.rank, total)
    return result


def _within(group: SliceGroup, transition: Transition, algorithm: Algorithm, table: GroupTable) -> Collectives:
    within = algorithm.within(transition.ranks, group.ranks)
    return Collectives(group.ranks, within, table, is_async=False)


def algorithm_of_slices(of_group: ChooseAlgorithm) -> ChooseAlgorithm:
    """Return the choice of a split collective's algorithm: that of its largest group that gains from two levels."""

    def choose(args: Sequence[Any], topology: Topology, choice: str) -> Algorithm:
        transition = parse_transition(args[0])
        algorithms = [(group, of_group((group.ranks,), topology, choice)) for group in slice_groups(transition)]
        bounds = [
            (group.numel, algorithm.two_level_from)
            for group, algorithm in algorithms
            if algorithm.two_level_from is not None
        ]
        if not bounds:
            return FLAT
        return Algorithm(number_nodes(transition.ranks, topology), max(bounds)[1])

    return choose


def _own_part(group: SliceGroup, rank: int) -> tuple[Dims, ...]:
    """Return the slices of `rank` in a group."""
    return group.parts[group.ranks.index(rank)]


def result_like(x: Tensor, transition: Transition, rank: int) -> Tensor:
    """Return an empty tensor for this rank's part after the change."""
    return x.new_empty(local_shape_like(transition.target, rank, transition.shape, x))


def take(x: Tensor, annotation: Annotation, transition: Transition, part: Sequence[Dims], rank: int) -> Tensor:
    """Lay slices of a local tensor end to end."""
    flats = [take_slice(x.detach(), local_dims(annotation, rank, transition.shape, dims)).reshape(-1) for dims in part]
    return torch.cat(flats) if flats else x.new_empty(0)


def write_slices(
    x: Tensor, annotation: Annotation, transition: Transition, part: Sequence[Dims], rank: int, flat: Tensor
) -> None:
    """Write slices that lie end to end into a local tensor."""
    offset = 0
    for dims in part:
        shape = slice_shape(dims, transition.shape, x)
        value = flat.narrow(0, offset, torch.Size(shape).numel()).view(shape)
        write(x, local_dims(annotation, rank, transition.shape, dims), value)
        offset += value.numel()


def _numel(part: Sequence[Dims], transition: Transition, like: Tensor) -> int:
    return sum(torch.Size(slice_shape(dims, transition.shape, like)).numel() for dims in part)
