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

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.annotations.states import even_sizes
from hetu_fx.comm_ops.wire.flat import Flat, dense
from hetu_fx.comm_ops.wire.groups import GroupTable, active, guarded
from hetu_fx.comm_ops.wire.p2p import PendingMessages, Tag, post
from hetu_fx.comm_ops.wire.small_sums import reduce_small

# Above this many bytes to send, more than two ranks do better with a ring than everybody to everybody.
_DIRECT_BYTES = 1 << 20

Made = TypeVar("Made")


@dataclass(slots=True)
class Exchange(Generic[Made]):
    """A collective under way; `wait` ends it, once, works out the result in place, and returns what it makes.

    What travels has a table: ranks that wait for unlike models are told by it. `what` it is, messages say.
    """

    ranks: tuple[int, ...] = ()
    works: list[Any] = field(default_factory=list)
    finish: Callable[[], object] | None = None
    table: GroupTable | None = None
    made: Made = None  # type: ignore[assignment]  # nothing is made where buffers are filled
    what: str = "exchange"

    def __post_init__(self) -> None:
        assert self.table is not None or not self.works, "what travels does so by a table"

    @property
    def has_arrived(self) -> bool:
        """Tell whether `wait` would not block."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> Made:
        """Block until all messages are through, or raise CommError after the group's timeout."""
        if self.works and self.table is not None:
            with guarded(self.what, self.ranks, self.table):
                self._arrive()
        return self.end()

    def end(self) -> Made:
        """Do what `wait` does for a caller that guards start and end as one."""
        self._arrive()
        if self.finish is not None:
            self.finish()
            self.finish = None
        return self.made

    def _arrive(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()

    def then(self, act: Callable[[], object]) -> Exchange[Made]:
        """Return it with something to do once the result is there."""
        finish = self.finish

        def both() -> None:
            if finish is not None:
                finish()
            act()

        self.finish = both
        return self


@dataclass(frozen=True, slots=True)
class GroupCollectives(ABC):
    """The collectives of some ranks by one algorithm, each started now and ended by the `wait` of what is returned.

    What is given must stay as it is until then. A collective of an op returns new tensors. One of a `number` works in
    place: a sum is in `x`, or in this rank's own part; those of different numbers may be under way together.

    Attributes:
        ranks: in the order of parts; this one is among them.
        table: of these.
        number: see above; None: of an op.
        is_async: the caller does something else meanwhile. If not, one of an op is over once it is started.
    """

    ranks: Sequence[int]
    table: GroupTable
    number: int | None = None
    is_async: bool = True

    def sum(self, x: Any) -> Exchange[Tensor]:
        """Sum a tensor over the ranks, to the same bits on all of them."""
        return self._started("all-reduce", lambda: self._sum(x))

    def gather(
        self, x: Tensor, shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None = None
    ) -> Exchange[list[Tensor]]:
        """Return the tensors of all ranks, `x` of this one, which are of these shapes; in the dense tensors `into`."""
        return self._started("all-gather", lambda: self._gather(x, shapes, into))

    def scatter(self, parts: Sequence[Tensor]) -> Exchange[Tensor]:
        """Sum this rank's part over the ranks; `parts[i]` goes to `ranks[i]`."""
        return self._started("reduce-scatter", lambda: self._scatter(parts))

    def _started(self, what: str, begin: Callable[[], Exchange[Made]]) -> Exchange[Made]:
        if self.number is not None or len(self.ranks) == 1:
            return begin()
        with guarded(what, self.ranks, self.table):
            exchange = begin()
            exchange.what = what
            if not self.is_async:
                exchange.end()
        return exchange

    def _under_way(self, works: list[Any], made: Made, finish: Callable[[], object] | None = None) -> Exchange[Made]:
        return Exchange(tuple(self.ranks), works, finish, self.table, made)

    @abstractmethod
    def _sum(self, x: Any) -> Exchange[Tensor]: ...

    @abstractmethod
    def _gather(
        self, x: Tensor, shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None
    ) -> Exchange[list[Tensor]]: ...

    @abstractmethod
    def _scatter(self, parts: Sequence[Tensor]) -> Exchange[Tensor]: ...


class FlatCollectives(GroupCollectives):
    """By messages, or as devices' own collectives, without levels; the summands of buckets always as messages."""

    __slots__ = ()

    def _sum(self, x: Tensor) -> Exchange[Tensor]:
        """`x` may be written to where nobody else has it. Large summands of many ranks that are staged come at once."""
        if self.number is not None:
            return self._sum_in_place(x)
        if len(self.ranks) == 1 or x.numel() == 0:
            return Exchange(made=fresh(x))
        wire, others = dense(x), len(self.ranks) - 1
        is_large = others > 1 and others * wire.nbytes > _DIRECT_BYTES
        is_staged = self.table.meets_on_host(x.device, self.ranks)
        if is_staged and is_large:
            return Exchange(made=self._sum_by_parts(wire))
        if is_staged or not (is_large or self.table.is_native(wire.device)):
            return self._add([wire] * len(self.ranks), torch.empty_like(wire), Tag.SUMMANDS, is_staged=is_staged)
        result = wire.clone() if wire.data_ptr() == x.data_ptr() else wire
        work = self._all_reduce(result, is_async=self.is_async)
        return self._under_way([] if work is None else [work], result)

    def _sum_in_place(self, x: Tensor) -> Exchange[Tensor]:
        if len(self.ranks) == 1:
            return Exchange(made=x)
        wire = self._on_wire(x)
        work = self._all_reduce(wire, is_async=True)
        return self._under_way([work], x, None if wire is x else lambda: x.copy_(wire))

    def _on_wire(self, x: Tensor) -> Tensor:
        """Bring a tensor to the device that its messages leave from, if it is not there."""
        return x.cpu() if self.table.is_staged(x.device, self.ranks) else x

    def _all_reduce(self, x: Tensor, *, is_async: bool) -> Any:
        return self.table.transport.all_reduce(Flat.over(x), self.table.group(self.ranks), is_async=is_async)

    def _sum_by_parts(self, x: Tensor) -> Tensor:
        """Let each of the ranks sum a part."""
        at_once = FlatCollectives(self.ranks, self.table, is_async=False)
        sizes = even_sizes(x.numel(), len(self.ranks))
        mine = at_once.scatter(x.view(-1).split(sizes)).wait()
        return torch.cat(at_once.gather(mine, [[size] for size in sizes]).wait()).view(x.shape)

    def _gather(
        self, x: Tensor, shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None
    ) -> Exchange[list[Tensor]]:
        if len(self.ranks) == 1:
            return Exchange(made=[x])
        here = self.table.position(self.ranks)
        parts = into or [x if i == here else x.new_empty(list(shape)) for i, shape in enumerate(shapes)]
        if all(part.numel() == 0 for part in parts):
            return Exchange(made=list(parts))
        wires = [dense(part) for part in parts]
        if into is None:
            is_staged = self.table.meets_on_host(x.device, self.ranks)
            return self._under_way((self._bring_staged if is_staged else self._bring)(wires), wires)
        if not self.table.is_staged(x.device, self.ranks):
            return self._under_way(self._bring(wires), wires)
        found = [part.cpu() if i == here else part.new_empty(part.shape, device="cpu") for i, part in enumerate(wires)]
        others = [(to, part) for i, (to, part) in enumerate(zip(wires, found, strict=True)) if i != here]
        return self._under_way(self._bring(found), wires, lambda: [to.copy_(part) for to, part in others])

    def _bring(self, parts: Sequence[Tensor]) -> list[Any]:
        """Fill the parts of all ranks, this one's own among them, with what those have."""
        table, group, flats = self.table, self.table.group(self.ranks), [Flat.over(part) for part in parts]
        if table.is_native(parts[0].device) and all(part.numel() for part in parts):
            ordered = [flats[i] for i in table.order(self.ranks)]
            return [table.transport.all_gather(ordered, flats[table.position(self.ranks)], group, is_async=True)]
        pairs = zip(self.ranks, flats, strict=True)
        return [table.transport.broadcast(x, table.to_global(r), group) for r, x in pairs if x.tensor.numel()]

    def _bring_staged(self, parts: Sequence[Tensor]) -> list[Any]:
        """Do so by messages that are staged."""
        here = self.table.position(self.ranks)
        return [self._swap(parts, [parts[here]] * len(parts), Tag.EXCHANGE, is_staged=True)]

    def _swap(
        self, rooms: Sequence[Tensor], leaving: Sequence[Tensor], tag: int, *, is_staged: bool
    ) -> PendingMessages:
        """Send to all other ranks, and receive from them, what is not empty.

        Every rank starts with the one after it, so that no rank is sent to by all at once.
        """
        here = self.table.position(self.ranks)
        turned = [*range(here + 1, len(self.ranks)), *range(here)]
        receives = [(r, x, tag) for r, x in zip(self.ranks, rooms, strict=True) if r != self.table.rank and x.numel()]
        sends = [(self.ranks[i], leaving[i], tag) for i in turned if leaving[i].numel()]
        return post(receives, sends, self.table, self.table.group(self.ranks), is_staged=is_staged)

    def _scatter(self, parts: Sequence[Tensor]) -> Exchange[Tensor]:
        if len(self.ranks) == 1:
            return Exchange(made=parts[0] if self.number is not None else fresh(parts[0]))
        here = self.table.position(self.ranks)
        if self.number is not None:
            return self._scatter_in_place(parts, parts[here], self.number)
        if all(part.numel() == 0 for part in parts):
            return Exchange(made=fresh(parts[here]))
        wires, is_staged = [dense(part) for part in parts], self.table.meets_on_host(parts[here].device, self.ranks)
        result = torch.empty_like(wires[here], memory_format=torch.contiguous_format)
        if is_staged or not self.table.is_native(result.device):
            return self._add(wires, result, Tag.SUMMANDS, is_staged=is_staged)
        ordered = [Flat.over(wires[i]) for i in self.table.order(self.ranks)]
        work = self.table.transport.reduce_scatter(
            Flat.over(result), ordered, self.table.group(self.ranks), is_async=self.is_async
        )
        return self._under_way([] if work is None else [work], result, wires.clear)

    def _scatter_in_place(self, parts: Sequence[Tensor], mine: Tensor, number: int) -> Exchange[Tensor]:
        wires = [self._on_wire(part) for part in parts]
        own = wires[self.table.position(self.ranks)]
        exchange = self._add(wires, own, Tag.BUCKETS + number)
        return exchange if own is mine else exchange.then(lambda: mine.copy_(own))

    def _add(self, leaving: Sequence[Tensor], result: Tensor, tag: int, *, is_staged: bool = False) -> Exchange[Tensor]:
        """Send to every other rank its part, and sum this rank's own with those that come, by rank.

        `result` may be this rank's own.
        """
        mine = leaving[self.table.position(self.ranks)]
        rooms = [mine if rank == self.table.rank else torch.empty_like(mine) for rank in self.ranks]
        posted = self._swap(rooms, leaving, tag, is_staged=is_staged)
        by_rank = sorted(range(len(rooms)), key=self.ranks.__getitem__)
        return self._under_way([posted], result, lambda: sum_in_order(result, [rooms[i] for i in by_rank]))

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Exchange[list[Tensor]]:
        """Send `parts[i]` to `ranks[i]`; return what comes from each, of shape `shapes[i]`; this rank's is its own."""
        return self._started("exchange", lambda: self._exchange(parts, shapes))

    def _exchange(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Exchange[list[Tensor]]:
        here = self.table.position(self.ranks)
        if len(self.ranks) == 1:
            return Exchange(made=[parts[here]])
        wires, is_staged = [dense(part) for part in parts], self.table.meets_on_host(parts[here].device, self.ranks)
        rooms = [wires[here] if i == here else wires[here].new_empty(list(shape)) for i, shape in enumerate(shapes)]
        return self._under_way([self._swap(rooms, wires, Tag.EXCHANGE, is_staged=is_staged)], rooms)


class PaddedCollectives(FlatCollectives):
    """Gathers and scatters as one collective of equal parts, padded to the largest; over once they are started."""

    __slots__ = ()

    def _gather(
        self, x: Tensor, shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None
    ) -> Exchange[list[Tensor]]:
        numels = [torch.Size(shape).numel() for shape in shapes]
        if len(self.ranks) == 1 or max(numels) == 0:
            return FlatCollectives._gather(self, x, shapes, into)
        wire = self._padded(x, max(numels))
        arrived = [Flat(torch.empty_like(wire.tensor)) for _ in self.ranks]
        self.table.transport.all_gather(arrived, wire, self.table.group(self.ranks))
        flats = dict(zip(self.table.order(self.ranks), (flat.tensor.to(x.device) for flat in arrived), strict=True))
        made = [flats[i][:numel].view(list(shape)) for i, (numel, shape) in enumerate(zip(numels, shapes, strict=True))]
        return Exchange(made=made)

    def _scatter(self, parts: Sequence[Tensor]) -> Exchange[Tensor]:
        mine, largest = parts[self.table.position(self.ranks)], max(part.numel() for part in parts)
        if len(self.ranks) == 1 or largest == 0:
            return FlatCollectives._scatter(self, parts)
        wires = [self._padded(parts[i], largest) for i in self.table.order(self.ranks)]
        result = torch.empty_like(wires[0].tensor)
        self.table.transport.reduce_scatter(Flat(result), wires, self.table.group(self.ranks))
        return Exchange(made=result[: mine.numel()].view(mine.shape).to(mine.device, copy=True))

    def _padded(self, x: Tensor, size: int) -> Flat:
        return Flat.of(self._on_wire(torch.nn.functional.pad(dense(x).view(-1), (0, size - x.numel()))))


def fresh(x: Tensor) -> Tensor:
    """Copy `x` to a new contiguous tensor, as an op must not give its input back."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def sum_in_order(result: Tensor, summands: Sequence[Tensor]) -> None:
    """Sum in order; where `result` is one of the summands, the first one is written to."""
    first, second, *rest = summands
    total = torch.add(first, second, out=first if any(result is summand for summand in summands) else result)
    for summand in rest:
        total += summand
    if total is not result:
        result.copy_(total)


def sum_all(buffer: Flat, ranks: Sequence[int]) -> Exchange[Tensor]:
    """Start to sum a buffer over `ranks`, in place."""
    return FlatCollectives(ranks, active(), 0).sum(buffer.tensor)


def reduce_world(value: Tensor, world: int, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
    """Reduce a small tensor over all ranks of the world, in place, and give it back; `what` it is, for messages."""
    return value if world == 1 else reduce_small(value, op, active(), what, world)
