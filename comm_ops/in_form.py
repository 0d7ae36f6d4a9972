"""Collectives in the form that their op carries: the one place where flat, padded and two-level ways part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetu_fx.comm_ops.plans.algorithm import Form
from hetu_fx.comm_ops.wire.collectives import gather_padded, gather_parts, reduce_padded, reduce_parts, sum_over
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.two_level import gather_in_levels, reduce_in_levels, sum_in_levels


def sum_in_form(x: Tensor, ranks: Sequence[int], form: Form, table: GroupTable) -> Tensor:
    """Give the sum of `x` over `ranks` as a new contiguous tensor, the same bits on all of them."""
    if form.in_two_levels(x.nbytes):
        return sum_in_levels(x, ranks, form.nodes, table)
    return sum_over(x, ranks, table)


def gather_in_form(
    x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], form: Form, table: GroupTable
) -> list[Tensor]:
    """Give the tensors of all `ranks`, of shape `shapes[i]`, in their order."""
    num_bytes = sum(torch.Size(shape).numel() for shape in shapes) * x.element_size()
    if form.in_two_levels(num_bytes):
        return gather_in_levels(x, shapes, ranks, form.nodes, table)
    gather = gather_padded if form.pads(num_bytes) else gather_parts
    return gather(x, shapes, ranks, table)


def reduce_in_form(parts: Sequence[Tensor], ranks: Sequence[int], form: Form, table: GroupTable) -> Tensor:
    """Give the sum over `ranks` of this rank's part as a new tensor; `parts[i]` goes to `ranks[i]`."""
    num_bytes = sum(part.nbytes for part in parts)
    if form.in_two_levels(num_bytes):
        return reduce_in_levels(parts, ranks, form.nodes, table)
    reduce = reduce_padded if form.pads(num_bytes) else reduce_parts
    return reduce(parts, ranks, table)
