"""The collectives as gloo and NCCL run them: unequal parts, any rank order, host staging, bounded waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.comm_ops.groups import GroupTable, guarded


def to_wire(x: Tensor, table: GroupTable) -> Tensor:
    """Make `x` contiguous on the device that its messages leave from."""
    x = x.detach().contiguous()
    return x.cpu() if table.staged(x.device) else x


def sum_over(x: Tensor, ranks: Sequence[int], table: GroupTable) -> Tensor:
    """Give the sum of `x` over `ranks` as a new contiguous tensor."""
    if len(ranks) == 1 or x.numel() == 0:
        return fresh(x)
    wire = to_wire(x, table)
    result = wire.clone() if wire.data_ptr() == x.data_ptr() else wire
    with guarded("all-reduce", ranks):
        dist.all_reduce(result, group=table.group(ranks))
    return result.to(x.device)


def gather_parts(
    x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], table: GroupTable
) -> list[Tensor]:
    """Give the tensors of all `ranks`, of shape `shapes[i]`, in their order.

    Gloo refuses unequal sizes, so all parts travel padded to the largest.
    """
    numels = [torch.Size(shape).numel() for shape in shapes]
    width = max(numels)
    if len(ranks) == 1 or width == 0:
        return [x.new_empty(shape) if shape != list(x.shape) else x for shape in shapes]
    wire = to_wire(x, table).view(-1)
    if wire.numel() < width:
        wire = torch.nn.functional.pad(wire, (0, width - wire.numel()))
    result = wire.new_empty(len(ranks) * width)
    with guarded("all-gather", ranks):
        dist.all_gather_into_tensor(result, wire, group=table.group(ranks))
    rows: list[Tensor] = [result] * len(ranks)
    for row, position in enumerate(table.order(ranks)):
        flat = result.narrow(0, row * width, numels[position])
        rows[position] = flat.view(list(shapes[position])).to(x.device)
    return rows


def reduce_parts(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> Tensor:
    """Give the sum over `ranks` of this rank's part; `parts[i]` goes to `ranks[i]`."""
    mine = parts[table.position(ranks)]
    if len(ranks) == 1 or all(part.numel() == 0 for part in parts):
        return fresh(mine)
    wires = [to_wire(parts[position], table).view(-1) for position in table.order(ranks)]
    result = wires[0].new_empty(mine.numel())
    with guarded("reduce-scatter", ranks):
        dist.reduce_scatter(result, wires, group=table.group(ranks))
    return result.view(mine.shape).to(mine.device)


def fresh(x: Tensor) -> Tensor:
    """Copy `x` to a new contiguous tensor, as an op must not give its input back."""
    return x.detach().clone(memory_format=torch.contiguous_format)
