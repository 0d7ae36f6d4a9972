"""Small sums and extremes over all ranks, which notice that ranks have made unlike calls.

Gloo takes messages of one kind for each other, whatever they are for: it ends the process where their sizes differ, and
mixes their values where they do not. So all that are small have one size, and carry a number of what they are for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.base.dtypes import as_reals, carries_gradient
from hetu_fx.comm_ops.plans.sum_tree import SumSteps
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, Rounds, guarded
from hetu_fx.comm_ops.wire.p2p import Tag, post
from hetu_fx.errors import DivergedError

_WIDTH = 64
_COMBINE: Mapping[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda numbers: numbers.sum(0),
    dist.ReduceOp.MAX: lambda numbers: numbers.amax(0),
    dist.ReduceOp.MIN: lambda numbers: numbers.amin(0),
}
"""How the rows of all ranks become one."""

MARKS = 2
_DIGEST_BYTES = 2  # so that the sum of squares over thousands of ranks is exact


def reduce_small(
    value: Tensor, op: dist.ReduceOp.RedOpType, table: GroupTable, what: str, size: int | None = None
) -> Tensor:
    """Reduce a small tensor over the ranks of a table, in place, and give it back; collective.

    Args:
        value: on the host, it travels in 64 bits; elsewhere as it is, and unlike calls are not noticed.
        op: SUM, MAX or MIN.
        table: the ranks.
        what: it is for, for messages.
        size: how many ranks, from 0 on; None: all.

    Raises:
        DivergedError: on every rank, if some have come with another `what`, size, dtype or op.
    """
    size = size or table.size
    if size == 1:
        return value
    if table.is_staged(value.device):
        return value.copy_(reduce_small(value.cpu(), op, table, what, size))
    if table.rounds is not None and value.device.type == "cpu" and size == table.size:
        return _reduced_by_round(value, op, table, table.rounds, what)
    with guarded(what, range(size), table):
        group = table.group(range(size))
        if value.device.type != "cpu":
            table.transport.all_reduce(Flat.over(value), group, op)
            return value
        head, rest = pack_small_sum(value, op, what)
        table.transport.all_reduce(Flat(head), group, op)
        if is_alike := are_alike(head[:MARKS].tolist(), op, size):
            if rest.numel():
                table.transport.all_reduce(Flat(rest), group, op)
    if not is_alike:
        refuse_unlike(table, what)
    flat = torch.cat([head[MARKS:], rest])[: _flat(value).numel()]
    _flat(value).copy_(flat)
    return value


def _reduced_by_round(
    value: Tensor, op: dist.ReduceOp.RedOpType, table: GroupTable, rounds: Rounds, what: str
) -> Tensor:
    """Do so where ranks say such things; what is beyond the size of a message goes by another one, as elsewhere."""
    flat = _wide(value)
    head, rest = flat[:_WIDTH], flat[_WIDTH:].clone()
    with guarded(what, range(table.size), table):
        said = rounds.say(
            head.view(torch.int32).tolist() if _is_whole(value) else head.tolist(), _text(value, op, what)
        )
        said.wait()
        if rest.numel():
            table.transport.all_reduce(Flat(rest), table.group(range(table.size)), op)
    if not flat.numel():
        return value
    heard = torch.tensor(said.heard, dtype=torch.float64)
    if _is_whole(value):
        heard = heard.to(torch.int32).view(torch.int64)
    _flat(value).copy_(torch.cat([_COMBINE[op](heard), rest]))
    return value


def sum_by_tree(
    sums: Sequence[float], largest: Sequence[float], steps: SumSteps, table: GroupTable, what: str
) -> tuple[list[float], list[float]]:
    """Return sums over all ranks, and the largest of other numbers, the same bits on each; collective.

    All numbers of a rank are one message of host memory, 8 bytes each; `steps` are this rank's of one tree.
    """
    total = torch.tensor([*sums, *largest], dtype=torch.float64)
    with guarded(what, range(table.size), table):
        if steps.head != table.rank:
            post((), [(steps.head, total, Tag.TREE)], table).wait()
            post([(steps.head, total, Tag.TREE)], (), table).wait()
        rooms = [(rank, torch.empty_like(total), Tag.TREE) for rank in steps.members]
        post(rooms, (), table).wait()
        for _, room, _ in rooms:
            _add(total, room, len(sums))
        for partner in steps.partners:
            room, leaving = torch.empty_like(total), total.clone()
            post([(partner, room, Tag.TREE)], [(partner, leaving, Tag.TREE)], table).wait()
            _add(total, room, len(sums))
        post((), [(rank, total, Tag.TREE) for rank in steps.members], table).wait()
    numbers = total.tolist()
    return numbers[: len(sums)], numbers[len(sums) :]


def _add(total: Tensor, other: Tensor, num_sums: int) -> None:
    total[:num_sums] += other[:num_sums]
    torch.maximum(total[num_sums:], other[num_sums:], out=total[num_sums:])


def _is_whole(value: Tensor) -> bool:
    return not carries_gradient(value.dtype)


def _wide(value: Tensor) -> Tensor:
    """Return its numbers in 64 bits."""
    return _flat(value).to(torch.int64 if _is_whole(value) else torch.float64)


def _text(value: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> str:
    return f"{what} {value.dtype} {tuple(value.shape)} {op}"


def _flat(value: Tensor) -> Tensor:
    return as_reals(value).view(-1)


def pack_small_sum(value: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> tuple[Tensor, Tensor]:
    """Return the message that all small ones look like, and what has no room in it."""
    text = _text(value, op, what)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big")
    flat = _wide(value)
    head = flat.new_zeros(_WIDTH)
    head[0], head[1] = digest, digest * digest if op == dist.ReduceOp.SUM else -digest
    own = flat[: _WIDTH - MARKS]
    head[MARKS : MARKS + own.numel()] = own
    return head, flat[_WIDTH - MARKS :].clone()


def are_alike(marks: list[float], op: dist.ReduceOp.RedOpType, size: int) -> bool:
    """Tell whether all ranks have had the same digest, from the sums of it and its square, or its two extremes."""
    if not all(map(math.isfinite, marks)):  # the other's numbers are of another kind
        return False
    if op == dist.ReduceOp.SUM:
        return int(marks[0]) ** 2 == size * int(marks[1])
    return marks[0] == -marks[1]


def refuse_unlike(table: GroupTable, what: str) -> NoReturn:
    """Raise DivergedError: this rank has come with `what`, others with something else."""
    if table.path is not None:
        table.path.refuse_unlike(what)
    raise DivergedError(
        f"rank {table.rank} asks for {what}, other ranks for something else; make the same calls on all"
    )
