"""One rank's side of one message of the bridge: what is packed, how it travels, where it is unpacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hetu_fx.annotations.region import Box
from hetu_fx.base.device_types import HOST
from hetu_fx.base.torch_private import foreach_copy, unflatten_dense_tensors
from hetu_fx.comm_ops.plans.routes import RouteKind
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.wire.algorithms import Collectives
from hetu_fx.comm_ops.wire.collectives import Exchange
from hetu_fx.comm_ops.wire.flat import Flat, is_dense
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.switching.bridge.bridge_plan import Message, ParameterBox
from hetu_fx.switching.home.layout import LocalPart, to_local

Cuts = tuple[tuple[int, int, int], ...]  # dim, start, length


def box_cuts(part: LocalPart, box: Box) -> Cuts:
    """Say which dims of a rank's part have to be narrowed to see a global box in it."""
    bounds = enumerate(to_local(box, part.region).bounds)
    return tuple((d, start, stop - start) for d, (start, stop) in bounds if stop - start != part.local_shape[d])


def view_box(tensor: Tensor, cuts: Cuts) -> Tensor:
    """View a box of a dense tensor."""
    for dim, start, length in cuts:
        tensor = tensor.narrow(dim, start, length)
    return tensor


@dataclass(frozen=True, slots=True)
class PackedBox:
    """Where a part is: number `position` of the flat buffer's parts, `cuts` of its tensor (none: all of it)."""

    name: str
    position: int
    numel: int
    cuts: Cuts


class MessageRun:
    """One rank's side of one message.

    Packing and unpacking are single calls over all parts (`cat`, `unflatten_dense_tensors`, `_foreach_copy_`):
    part by part they cost 9 microseconds each, which for 150 small parameters is a fifth of the message.
    """

    def __init__(
        self,
        message: Message,
        table: GroupTable,
        sources: Mapping[str, LocalPart],
        targets: Mapping[str, LocalPart],
        tag: int,
        lowering: Lowering,
    ) -> None:
        self.lane, self.sizes, rank = message.lane, message.sizes, table.rank
        algorithm = lowering.algorithm(message.lane.kind, message.lane.ranks)
        self.collectives = Collectives(message.lane.ranks, algorithm, table, tag)
        self.gives = not self.lane.givers or rank in self.lane.givers
        every = range(len(self.sizes))
        self.here = 0 if self.lane.kind is RouteKind.SUM else self.lane.ranks.index(rank)
        match self.lane.kind:
            case RouteKind.SUM:
                packed, unpacked = list(every), list(every)
            case RouteKind.SCATTER:
                packed, unpacked = list(every), [self.here]
            case RouteKind.GATHER:
                packed, unpacked = [self.here], [i for i in every if i != self.here]
        starts = [sum(map(len, message.segments[:i])) for i in every]
        self.packed = [s for i in packed for s in _slots(starts[i], message.segments[i], sources)]
        self.unpacked = [s for i in unpacked for s in _slots(starts[i], message.segments[i], targets)]
        # Who has each of the parts that arrive; of no meaning for sums.
        self.givers = [self.lane.ranks[i % len(self.lane.ranks)] for i in unpacked for _ in message.segments[i]]
        # Only their shapes are read.
        self.templates = [
            torch.empty([stop - start for start, stop in part.box.bounds], device="meta")
            for segment in message.segments
            for part in segment
        ]

    def pack(self, values: Mapping[str, Tensor | None], empty: Tensor) -> Flat:
        """Make the buffer, of the kind of `empty`; a missing gradient is zeros.

        The gradient of a message of its own, if it is dense, is its own buffer.
        """
        pieces = [self._piece(slot, values.get(slot.name), empty) for slot in self.packed]
        if self.lane.kind is not RouteKind.GATHER:
            return Flat.joined(pieces)
        buffer = Flat(empty.new_empty(sum(self.sizes)))
        if pieces:
            torch.cat(pieces, out=buffer.segments(self.sizes)[self.here].tensor)
        return buffer

    def _piece(self, slot: PackedBox, value: Tensor | None, empty: Tensor) -> Tensor:
        """Return a part in one dim; a view of a box has strides."""
        if value is None or not self.gives:
            return empty.new_zeros(slot.numel)
        return view_box(value, slot.cuts).reshape(-1).to(empty.device)

    def meet(self, itemsize: int, *, on_host: bool) -> None:
        """Make the message's process group, if it is not there yet; collective over its ranks."""
        self.collectives.meet(sum(self.sizes) * itemsize, on_host=on_host)

    def begin(
        self, values: Mapping[str, Tensor | None], empty: Tensor, arrivals: Arrivals
    ) -> tuple[Flat | None, Exchange[Any]]:
        """Start the message; return its buffer, of the kind of `empty`, for `unpack`.

        None: what arrives is put where it belongs, from where the others have it.
        """
        if self.lane.kind is RouteKind.GATHER and (found := self._taken(values, empty, arrivals)):
            return None, found
        buffer = self.pack(values, empty)
        return buffer, self.start(buffer)

    def _taken(self, values: Mapping[str, Tensor | None], empty: Tensor, arrivals: Arrivals) -> Exchange[None] | None:
        """Start to take the others' pieces where ranks can read them; None where they cannot."""
        stands, ranks = empty.is_cpu and arrivals.device == HOST, self.lane.ranks
        reader = self.collectives.reader(empty, sum(self.sizes) * empty.itemsize) if stands else None
        if reader is None:
            return None
        pieces = [Flat.of(self._piece(slot, values.get(slot.name), empty)) for slot in self.packed]
        targets = [view_box(arrivals.make(slot.name), slot.cuts) for slot in self.unpacked]
        rooms = [x if is_dense(x) else torch.empty(x.shape, dtype=x.dtype) for x in targets]
        given = list(zip(map(Flat.over, rooms), self.givers, strict=True))
        by_rank = {rank: [x for x, giver in given if giver == rank] for rank in ranks}
        exchange = reader.take(pieces, by_rank, self.sizes)
        strided = [(x, room) for x, room in zip(targets, rooms, strict=True) if room is not x]
        return exchange.then(partial(_fill, strided)) if strided else exchange

    def start(self, buffer: Flat) -> Exchange[Any]:
        """Start the message, as its form, its size and what ranks can say."""
        if self.lane.kind is RouteKind.SUM:
            return self.collectives.sum(buffer.tensor)
        parts = buffer.tensor.split(list(self.sizes))
        if self.lane.kind is RouteKind.SCATTER:
            return self.collectives.scatter(parts)
        return self.collectives.gather(parts[self.here], [(size,) for size in self.sizes], parts)

    def unpack(self, buffer: Flat, arrivals: Arrivals) -> None:
        """Take the arrived parts out of the buffer.

        A sum of a whole tensor is given as a view of the buffer, which holds nothing but such sums.
        """
        parts = unflatten_dense_tensors(buffer.tensor, self.templates)
        sources, targets = [], []
        for slot in self.unpacked:
            if not slot.cuts and self.lane.kind is RouteKind.SUM:
                arrivals.tensors[slot.name] = parts[slot.position].to(arrivals.device)
            else:
                sources.append(parts[slot.position])
                targets.append(view_box(arrivals.make(slot.name), slot.cuts))
        if sources:
            foreach_copy(targets, sources)


def _fill(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy to each first tensor its second."""
    foreach_copy([target for target, _ in pairs], [source for _, source in pairs])


def _slots(start: int, parts: Iterable[ParameterBox], places: Mapping[str, LocalPart]) -> list[PackedBox]:
    return [
        PackedBox(part.name, start + number, part.numel, box_cuts(places[part.name], part.box))
        for number, part in enumerate(parts)
    ]


class Arrivals:
    """The results of a bucket, allocated when their first part arrives, or written `into` tensors that are there."""

    def __init__(
        self,
        places: Mapping[str, LocalPart],
        dtype: torch.dtype,
        device: torch.device,
        into: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.places, self.dtype, self.device = places, dtype, device
        self.tensors: dict[str, Tensor] = {}
        self._into = into or {}

    def make(self, name: str) -> Tensor:
        """Return the result of a name, uninitialised at first."""
        if name not in self.tensors:
            shape, given = self.places[name].local_shape, self._into.get(name)
            self.tensors[name] = torch.empty(shape, dtype=self.dtype, device=self.device) if given is None else given
        return self.tensors[name]
