"""The collectives as they run: unequal parts, ranks in any order, host staging, bounded waits.

Each is started now and ended by wait(); what is waited for at once is started and ended in one. Tensors on the device
run native collectives, but for the summands of buckets. On the host (gloo) the same is done by messages, measured on 2
and 4 ranks of one machine (float32, milliseconds, 16 KiB / 256 KiB / 4 MiB):
  all-reduce, 2 ranks:      all_reduce 0.25 / 0.36 / 4.2; everybody to everybody 0.17 / 0.26 / 3.0
  all-reduce, 4 ranks:      all_reduce 4.7 / 4.6 / 11; everybody to everybody 2.6 / 2.8 / 49
  all-gather, 2 ranks:      all_gather 0.23 / 0.29 / 3.5; a broadcast per part 0.19 / 0.25 / 2.5
  reduce-scatter, 4 ranks:  reduce_scatter 15 / 19 / 47; messages, summed in rank order 0.9 / 1.5 / 15
and for buckets (25 MB in all, milliseconds on 2 ranks / 4 ranks, even sizes):
  all-gather:     a broadcast per part 10 / 23; isend and irecv 12 / 22; all_gather_into_tensor (even sizes only)
                  14 / 26; all_to_all_single 20 / 34; padded 23 / 31 (sizes 2:1:1:1: 51 / 86)
  reduce-scatter: messages, then a sum 15 / 25; all_to_all_single, then a sum 18 / 30; all_reduce and a slice 23 / 42;
                  list-form reduce_scatter 26 / 53
gloo's all_gather also refuses unequal parts, which broadcasts take without padding. Sums are made in the order of the
ranks, so that they have the same bits whatever the layout.

Between devices that cannot send to each other, what is waited for at once goes by messages too, as these are staged in
chunks that overlap: a tensor that is copied whole takes as long as both copies and the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.annotations.states import even_sizes
from hetu_fx.comm_ops.wire.flat import Flat, dense
from hetu_fx.comm_ops.wire.groups import GroupTable, active, guarded
from hetu_fx.comm_ops.wire.p2p import Tag, post
from hetu_fx.comm_ops.wire.small_sums import reduce_small

# Above this many bytes to send, more than two ranks do better with a ring than everybody to everybody.
_DIRECT_BYTES = 1 << 20

Made = TypeVar("Made")


@dataclass(slots=True)
class Exchange:
    """A collective under way; `wait` ends it, once, and then works out the result in place.

    What travels has a table: ranks that wait for unlike models are told by it.
    """

    ranks: tuple[int, ...] = ()
    works: list[Any] = field(default_factory=list)
    finish: Callable[[], object] | None = None
    table: GroupTable | None = None

    def __post_init__(self) -> None:
        assert self.table is not None or not self.works, "what travels does so by a table"

    @property
    def has_arrived(self) -> bool:
        """Tell whether `wait` would not block."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Block until all messages are through, or raise CommError after the group's timeout."""
        if self.table is not None:
            with guarded("exchange", self.ranks, self.table):
                self._arrive()
        self._finish()

    def end(self) -> None:
        """Do what `wait` does for a caller that guards start and end as one."""
        self._arrive()
        self._finish()

    def _arrive(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()

    def then(self, act: Callable[[], object]) -> Exchange:
        """Return it with something to do once the result is there."""
        finish = self.finish

        def both() -> None:
            if finish is not None:
                finish()
            act()

        self.finish = both
        return self

    def _finish(self) -> None:
        if self.finish is not None:
            self.finish()
            self.finish = None


@dataclass(slots=True)
class PendingWork(Generic[Made]):
    """What a collective makes, and the collective, if it is not over."""

    made: Made
    exchange: Exchange = field(default_factory=Exchange)

    def end(self) -> Made:
        """Wait for it; for a caller that guards it."""
        self.exchange.end()
        return self.made


def _to_wire(x: Flat, ranks: Sequence[int], table: GroupTable) -> Flat:
    """Bring a buffer to the device that its messages between `ranks` leave from, if it is not there."""
    return Flat(x.tensor.cpu()) if table.is_staged(x.tensor.device, ranks) else x


def fresh(x: Tensor) -> Tensor:
    """Copy `x` to a new contiguous tensor, as an op must not give its input back."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _start_gather(parts: Sequence[Flat], ranks: Sequence[int], table: GroupTable) -> Exchange:
    """Fill `parts`, one of each of `ranks` and this rank's own among them, with what those have. Collective."""
    group = table.group(ranks)
    if table.is_native(parts[0].tensor.device) and all(part.tensor.numel() for part in parts):
        ordered = [parts[i] for i in table.order(ranks)]
        work = table.transport.all_gather(ordered, parts[table.position(ranks)], group, is_async=True)
        return Exchange(tuple(ranks), [work], table=table)
    works = [
        table.transport.broadcast(part, table.to_global(rank), group)
        for rank, part in zip(ranks, parts, strict=True)
        if part.tensor.numel()
    ]
    return Exchange(tuple(ranks), works, table=table)


def _start_sum(
    outgoing: Mapping[int, Tensor],
    result: Tensor,
    ranks: Sequence[int],
    table: GroupTable,
    tag: int,
    *,
    is_staged: bool = False,
) -> Exchange:
    """Send `outgoing[rank]` to every other rank, and sum this rank's own with those that come, by rank. Collective.

    `result` may be this rank's own.
    """
    mine, here = outgoing[table.rank], list(ranks).index(table.rank)
    summands = {rank: mine if rank == table.rank else torch.empty_like(mine) for rank in sorted(ranks)}
    receives = [(rank, x, tag) for rank, x in summands.items() if rank != table.rank and mine.numel()]
    # Every rank starts with the one after it, so that no rank is sent to by all at once.
    turned = [*ranks[here + 1 :], *ranks[:here]]
    sends = [(rank, outgoing[rank], tag) for rank in turned if outgoing[rank].numel()]
    posted = post(receives, sends, table, table.group(ranks), is_staged=is_staged)
    return Exchange(tuple(ranks), [posted], lambda: sum_in_order(result, list(summands.values())), table=table)


def sum_in_order(result: Tensor, summands: Sequence[Tensor]) -> None:
    """Sum in order; where `result` is one of the summands, the first one is written to."""
    first, second, *rest = summands
    total = torch.add(first, second, out=first if any(result is summand for summand in summands) else result)
    for summand in rest:
        total += summand
    if total is not result:
        result.copy_(total)


def gather_segments(buffer: Flat, sizes: Sequence[int], ranks: Sequence[int]) -> Exchange:
    """Fill every rank's segment of `buffer` with what that rank has there. Collective over `ranks`.

    The segments of `ranks` stand end to end in it, `sizes[i]` entries for `ranks[i]`.
    """
    if len(ranks) == 1:
        return Exchange()
    table = active()
    wire = _to_wire(buffer, ranks, table)
    exchange = _start_gather(wire.segments(sizes), ranks, table)
    return exchange if wire is buffer else exchange.then(lambda: buffer.copy_from(wire))


def sum_segments(buffer: Flat, sizes: Sequence[int], ranks: Sequence[int], number: int = 0) -> Exchange:
    """Sum every rank's segment over what all `ranks` have there, in their order. Collective over `ranks`.

    The sum stands in this rank's own segment after wait(); the other segments are its summands and stay.
    Exchanges of different numbers may be under way together.
    """
    if len(ranks) == 1:
        return Exchange()
    table = active()
    wire, here = _to_wire(buffer, ranks, table), table.position(ranks)
    parts, mine = wire.segments(sizes), buffer.segments(sizes)[here]
    outgoing = {rank: part.tensor for rank, part in zip(ranks, parts, strict=True)}
    exchange = _start_sum(outgoing, outgoing[table.rank], ranks, table, Tag.BUCKETS + number)
    return exchange if wire is buffer else exchange.then(lambda: mine.copy_from(parts[here]))


def sum_all(buffer: Flat, ranks: Sequence[int]) -> Exchange:
    """Sum a buffer over `ranks`, in place."""
    if len(ranks) == 1:
        return Exchange()
    table = active()
    wire = _to_wire(buffer, ranks, table)
    exchange = Exchange(
        tuple(ranks), [table.transport.all_reduce(wire, table.group(tuple(ranks)), is_async=True)], table=table
    )
    return exchange if wire is buffer else exchange.then(lambda: buffer.copy_from(wire))


def reduce_world(value: Tensor, world: int, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
    """Reduce a small tensor over all ranks of the world, in place, and give it back; `what` it is, for messages."""
    return value if world == 1 else reduce_small(value, op, active(), what, world)


def sum_tensor(x: Tensor, ranks: Sequence[int], table: GroupTable) -> Tensor:
    """Return the sum of `x` over `ranks` as a new contiguous tensor, the same bits on all of them."""
    if len(ranks) == 1 or x.numel() == 0:
        return fresh(x)
    with guarded("all-reduce", ranks, table):
        return begin_sum(x, ranks, table, is_async=False).end()


def begin_sum(x: Tensor, ranks: Sequence[int], table: GroupTable, *, is_async: bool = True) -> PendingWork[Tensor]:
    """Start what `sum_tensor` does; `x` may be written to where nobody else has it. The caller guards it.

    Large summands of many ranks that are staged are summed at once.
    """
    if len(ranks) == 1 or x.numel() == 0:
        return PendingWork(fresh(x))
    wire, others = dense(x), len(ranks) - 1
    is_large, is_staged = others > 1 and others * wire.nbytes > _DIRECT_BYTES, table.meets_on_host(x.device, ranks)
    if is_staged and is_large:
        return PendingWork(_sum_by_parts(wire, ranks, table))
    if is_staged or not (is_large or table.is_native(wire.device)):
        result = torch.empty_like(wire)
        outgoing = dict.fromkeys(ranks, wire)
        return PendingWork(result, _start_sum(outgoing, result, ranks, table, Tag.SUMMANDS, is_staged=is_staged))
    result = wire.clone() if wire.data_ptr() == x.data_ptr() else wire
    work = table.transport.all_reduce(Flat.over(result), table.group(ranks), is_async=is_async)
    return PendingWork(result, Exchange(tuple(ranks), [] if work is None else [work], table=table))


def _sum_by_parts(x: Tensor, ranks: Sequence[int], table: GroupTable) -> Tensor:
    """Let each of the ranks sum a part."""
    sizes = even_sizes(x.numel(), len(ranks))
    mine = reduce_parts(x.view(-1).split(sizes), ranks, table)
    return torch.cat(gather_parts(mine, [[size] for size in sizes], ranks, table)).view(x.shape)


def _start_staged_gather(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> Exchange:
    """Do what `_start_gather` does by messages that are staged."""
    here = table.position(ranks)
    receives = [(r, x, Tag.EXCHANGE) for r, x in zip(ranks, parts, strict=True) if r != table.rank and x.numel()]
    turned = [*ranks[here + 1 :], *ranks[:here]] if parts[here].numel() else []
    sends = [(rank, parts[here], Tag.EXCHANGE) for rank in turned]
    return Exchange(tuple(ranks), [post(receives, sends, table, table.group(ranks), is_staged=True)], table=table)


def gather_parts(x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], table: GroupTable) -> list[Tensor]:
    """Return the tensors of all `ranks`, of shape `shapes[i]`, in their order; this rank's is `x` itself."""
    if len(ranks) == 1:
        return [x]
    with guarded("all-gather", ranks, table):
        return begin_gather(x, shapes, ranks, table).end()


def begin_gather(
    x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], table: GroupTable
) -> PendingWork[list[Tensor]]:
    """Start what `gather_parts` does. The caller guards it."""
    here = table.position(ranks)
    parts = [x if i == here else x.new_empty(list(shape)) for i, shape in enumerate(shapes)]
    if len(ranks) == 1 or all(part.numel() == 0 for part in parts):
        return PendingWork(parts)
    wires = [dense(part) for part in parts]
    if table.meets_on_host(x.device, ranks):
        return PendingWork(wires, _start_staged_gather(wires, ranks, table))
    return PendingWork(wires, _start_gather([Flat.over(wire) for wire in wires], ranks, table))


def reduce_parts(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> Tensor:
    """Return the sum over `ranks` of this rank's part as a new tensor; `parts[i]` goes to `ranks[i]`."""
    if len(ranks) == 1:
        return fresh(parts[0])
    with guarded("reduce-scatter", ranks, table):
        return begin_reduce(parts, ranks, table, is_async=False).end()


def begin_reduce(
    parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable, *, is_async: bool = True
) -> PendingWork[Tensor]:
    """Start what `reduce_parts` does. The caller guards it."""
    here = table.position(ranks)
    if len(ranks) == 1 or all(part.numel() == 0 for part in parts):
        return PendingWork(fresh(parts[here]))
    wires, is_staged = [dense(part) for part in parts], table.meets_on_host(parts[here].device, ranks)
    result = torch.empty_like(wires[here], memory_format=torch.contiguous_format)
    if is_staged or not table.is_native(result.device):
        outgoing = dict(zip(ranks, wires, strict=True))
        return PendingWork(result, _start_sum(outgoing, result, ranks, table, Tag.SUMMANDS, is_staged=is_staged))
    ordered = [Flat.over(wires[i]) for i in table.order(ranks)]
    work = table.transport.reduce_scatter(Flat.over(result), ordered, table.group(ranks), is_async=is_async)
    return PendingWork(result, Exchange(tuple(ranks), [] if work is None else [work], wires.clear, table=table))


def exchange_parts(
    parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int], table: GroupTable
) -> list[Tensor]:
    """Send `parts[i]` to `ranks[i]`, and return what comes from each, of shape `shapes[i]`; this rank's is its own."""
    here = table.position(ranks)
    if len(ranks) == 1:
        return [parts[here]]
    wires, is_staged = [dense(part) for part in parts], table.meets_on_host(parts[here].device, ranks)
    arriving = [wires[here] if i == here else wires[here].new_empty(list(shape)) for i, shape in enumerate(shapes)]
    receives = [(r, x, Tag.EXCHANGE) for r, x in zip(ranks, arriving, strict=True) if r != table.rank and x.numel()]
    # Every rank starts with the one after it, so that no rank is sent to by all at once.
    turned = [*range(here + 1, len(ranks)), *range(here)]
    sends = [(ranks[i], wires[i], Tag.EXCHANGE) for i in turned if wires[i].numel()]
    with guarded("exchange", ranks, table):
        post(receives, sends, table, table.group(ranks), is_staged=is_staged).wait()
    return arriving


def gather_as_padded(
    x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], table: GroupTable
) -> list[Tensor]:
    """Do what `gather_parts` does in one collective of equal parts, padded to the largest."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    largest = max(numels)
    if len(ranks) == 1 or largest == 0:
        return gather_parts(x, shapes, ranks, table)
    wire = _to_wire(_padded(x, largest), ranks, table)
    with guarded("all-gather", ranks, table):
        arrived = [Flat(torch.empty_like(wire.tensor)) for _ in ranks]
        table.transport.all_gather(arrived, wire, table.group(ranks))
    flats = dict(zip(table.order(ranks), (flat.tensor.to(x.device) for flat in arrived), strict=True))
    return [flats[i][:numel].view(list(shape)) for i, (numel, shape) in enumerate(zip(numels, shapes, strict=True))]


def reduce_as_padded(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> Tensor:
    """Do what `reduce_parts` does in one collective of equal parts, padded to the largest."""
    mine = parts[table.position(ranks)]
    largest = max(part.numel() for part in parts)
    if len(ranks) == 1 or largest == 0:
        return reduce_parts(parts, ranks, table)
    wires = [_to_wire(_padded(parts[i], largest), ranks, table) for i in table.order(ranks)]
    with guarded("reduce-scatter", ranks, table):
        result = torch.empty_like(wires[0].tensor)
        table.transport.reduce_scatter(Flat(result), wires, table.group(ranks))
    return result[: mine.numel()].view(mine.shape).to(mine.device, copy=True)


def _padded(x: Tensor, size: int) -> Flat:
    return Flat.of(torch.nn.functional.pad(dense(x).view(-1), (0, size - x.numel())))
