"""One rank's work for one bucket of the bridge: pack, start, wait, unpack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.region import Box, Region
from hetu_fx.comm_ops.bsr_plan import Move, plan_moves
from hetu_fx.comm_ops.bsr_run import run_moves
from hetu_fx.comm_ops.change import Change
from hetu_fx.comm_ops.groups import GroupTable
from hetu_fx.comm_ops.slices import finest_slices
from hetu_fx.errors import StateError
from hetu_fx.switching.bridge_plan import Bucket, Kind, Message, Part, boxes_of
from hetu_fx.switching.exchange import Exchange, gather_segments, segments, sum_all, sum_segments
from hetu_fx.switching.home_layout import to_local

Cuts = tuple[tuple[int, int, int], ...]  # dim, start, length


@dataclass(frozen=True, slots=True)
class Crossing:
    """One parameter's way over the bridge in one direction."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Annotation
    target: Annotation


class Place:
    """One rank's dense tensor of a parameter under one annotation."""

    def __init__(self, annotation: Annotation, shape: tuple[int, ...], rank: int) -> None:
        self.held = annotation.holds(rank)
        self.region = annotation.region(rank, shape) if self.held else Region(((),) * len(shape))
        self.shape = self.region.local_shape if shape or self.held else (0,)

    def cuts(self, box: Box) -> Cuts:
        """Say which dims have to be narrowed to see a global box in the dense tensor."""
        bounds = enumerate(to_local(box, self.region).bounds)
        return tuple((d, start, stop - start) for d, (start, stop) in bounds if stop - start != self.shape[d])


def narrowed(tensor: Tensor, cuts: Cuts) -> Tensor:
    """View a box of a dense tensor."""
    for dim, start, length in cuts:
        tensor = tensor.narrow(dim, start, length)
    return tensor


@dataclass(frozen=True, slots=True)
class Slot:
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
        rank: int,
        sources: Mapping[str, Place],
        targets: Mapping[str, Place],
        tag: int,
    ) -> None:
        self.lane, self.sizes, self.tag = message.lane, message.sizes, tag
        self.gives = not self.lane.givers or rank in self.lane.givers
        every = range(len(self.sizes))
        self.here = 0 if self.lane.kind is Kind.SUM else self.lane.ranks.index(rank)
        match self.lane.kind:
            case Kind.SUM:
                packed, unpacked = list(every), list(every)
            case Kind.SCATTER:
                packed, unpacked = list(every), [self.here]
            case Kind.GATHER:
                packed, unpacked = [self.here], [i for i in every if i != self.here]
        starts = [sum(map(len, message.segments[:i])) for i in every]
        self.packed = [s for i in packed for s in _slots(starts[i], message.segments[i], sources)]
        self.unpacked = [s for i in unpacked for s in _slots(starts[i], message.segments[i], targets)]
        # Only their shapes are read.
        self.templates = [
            torch.empty([stop - start for start, stop in part.box.bounds], device="meta")
            for segment in message.segments
            for part in segment
        ]

    def pack(self, values: Mapping[str, Tensor | None], empty: Tensor) -> Tensor:
        """Make the flat buffer, of the kind of `empty`; a missing gradient is zeros.

        The gradient of a message of its own, if it is contiguous, is its own buffer.
        """
        pieces = [self._piece(slot, values.get(slot.name), empty) for slot in self.packed]
        if self.lane.kind is not Kind.GATHER:
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        buffer = empty.new_empty(sum(self.sizes))
        if pieces:
            torch.cat(pieces, out=segments(buffer, self.sizes)[self.here])
        return buffer

    def _piece(self, slot: Slot, value: Tensor | None, empty: Tensor) -> Tensor:
        if value is None or not self.gives:
            return empty.new_zeros(slot.numel)
        return narrowed(value, slot.cuts).reshape(-1).to(empty.device)

    def start(self, buffer: Tensor) -> Exchange:
        """Start the message."""
        match self.lane.kind:
            case Kind.SUM:
                return sum_all(buffer, self.lane.ranks)
            case Kind.SCATTER:
                return sum_segments(buffer, self.sizes, self.lane.ranks, self.tag)
            case Kind.GATHER:
                return gather_segments(buffer, self.sizes, self.lane.ranks)

    def unpack(self, buffer: Tensor, arrivals: Arrivals) -> None:
        """Take the arrived parts out of the buffer.

        A sum of a whole tensor is given as a view of the buffer, which holds nothing but such sums.
        """
        parts = torch._C._nn.unflatten_dense_tensors(buffer, self.templates)
        sources, targets = [], []
        for slot in self.unpacked:
            if not slot.cuts and self.lane.kind is Kind.SUM:
                arrivals.tensors[slot.name] = parts[slot.position].to(arrivals.device)
            else:
                sources.append(parts[slot.position])
                targets.append(narrowed(arrivals.make(slot.name), slot.cuts))
        if sources:
            torch._foreach_copy_(targets, sources)


def _slots(start: int, parts: Iterable[Part], places: Mapping[str, Place]) -> list[Slot]:
    return [
        Slot(part.name, start + number, part.numel, places[part.name].cuts(part.box))
        for number, part in enumerate(parts)
    ]


class Arrivals:
    """The results of a bucket, allocated when their first part arrives."""

    def __init__(self, places: Mapping[str, Place], dtype: torch.dtype, device: torch.device) -> None:
        self.places, self.dtype, self.device = places, dtype, device
        self.tensors: dict[str, Tensor] = {}

    def make(self, name: str) -> Tensor:
        """Give the result of a name, uninitialised at first."""
        if name not in self.tensors:
            self.tensors[name] = torch.empty(self.places[name].shape, dtype=self.dtype, device=self.device)
        return self.tensors[name]


class BucketRun:
    """One rank's side of one bucket, in one direction.

    `required` says that every held tensor must be given (home pieces); else a missing one is zeros
    (gradients), and every name has a result, be it empty.
    """

    def __init__(
        self, table: GroupTable, bucket: Bucket, crossings: Sequence[Crossing], tag: int, *, required: bool
    ) -> None:
        rank = table.rank
        self.table, self.dtype, self.required = table, bucket.dtype, required
        self.sources = {c.name: Place(c.source, c.shape, rank) for c in crossings}
        self.targets = {c.name: Place(c.target, c.shape, rank) for c in crossings}
        self.messages = [
            MessageRun(message, rank, self.sources, self.targets, tag)
            for message in bucket.messages
            if rank in message.lane.ranks
        ]
        moved = [c for c in crossings if c.name in bucket.moved]
        self.moved = tuple(c.name for c in moved)
        self.moves = plan_moves([Move(c.source, c.target, c.shape, c.dtype.itemsize) for c in moved])
        told = {slot.name for message in self.messages for slot in message.unpacked}
        still = [c for c in crossings if c.name not in bucket.moved]
        self.kept = {c.name for c in still if c.name not in told and self._stays(c.name)}
        self.copied = [(c.name, *cuts) for c in still if c.name not in self.kept for cuts in self._own(c, rank)]

    def _stays(self, name: str) -> bool:
        source, target = self.sources[name], self.targets[name]
        return source.held and target.held and source.region.dims == target.region.dims

    def _own(self, crossing: Crossing, rank: int) -> list[tuple[Cuts, Cuts]]:
        """List what this rank takes from itself: (cuts of the source, cuts of the target)."""
        source, target = self.sources[crossing.name], self.targets[crossing.name]
        boxes = [
            box
            for part in finest_slices(Change(crossing.source, crossing.target, crossing.shape))
            if rank in part.receivers and any(len(copy) == 1 and rank in copy[0] for copy in part.owners)
            for box in boxes_of(part)
        ]
        return [(source.cuts(box), target.cuts(box)) for box in boxes]

    @torch.no_grad()
    def start(self, tensors: Mapping[str, Tensor | None], device: torch.device) -> UnderWay:
        """Pack this rank's tensors and start the messages. Raises StateError for a missing or misfit tensor."""
        values = {name: self._value(name, tensors.get(name)) for name in self.sources}
        host = torch.device("cpu") if self.messages and self.table.staged(device) else device
        empty = torch.empty(0, dtype=self.dtype, device=host)
        buffers = [message.pack(values, empty) for message in self.messages]
        starts = [message.start(buffer) for message, buffer in zip(self.messages, buffers, strict=True)]
        return UnderWay(self, values, buffers, starts, device)

    def _value(self, name: str, tensor: Tensor | None) -> Tensor | None:
        place = self.sources[name]
        if not place.held or tensor is None:
            if place.held and self.required:
                raise StateError(f"rank {self.table.rank} has a home piece of {name!r}, but none was given")
            return None
        if tensor.shape != place.shape:
            raise StateError(f"rank {self.table.rank} holds {name!r} in shape {place.shape}, got {tuple(tensor.shape)}")
        if tensor.requires_grad:
            tensor = tensor.detach()
        return tensor if tensor.dtype is self.dtype else tensor.to(self.dtype)

    def take_own(self, values: Mapping[str, Tensor | None], arrivals: Arrivals) -> None:
        """Put in what this rank has itself."""
        for name in self.kept:
            value = values[name]
            arrivals.tensors[name] = arrivals.make(name).zero_() if value is None else value
        for name, source, target in self.copied:
            value, result = values[name], narrowed(arrivals.make(name), target)
            if value is None:
                result.zero_()
            else:
                result.copy_(narrowed(value, source))

    def move(self, values: Mapping[str, Tensor | None], arrivals: Arrivals) -> None:
        """Bring over what goes by batched send-receive."""
        if not self.moved:
            return
        like = torch.empty(0, dtype=self.dtype, device=arrivals.device)
        tensors: list[Tensor | None] = []
        for name in self.moved:
            value, place = values[name], self.sources[name]
            tensors.append(like.new_zeros(place.shape) if value is None and place.held else value)
        found = run_moves(self.moves, tensors, self.table, like=[like] * len(tensors))
        for name, result in zip(self.moved, found, strict=True):
            if result is not None:
                arrivals.tensors[name] = result


@dataclass(slots=True)
class UnderWay:
    """A bucket under way; `wait` ends it."""

    run: BucketRun
    values: dict[str, Tensor | None]
    buffers: list[Tensor]
    exchanges: list[Exchange]
    device: torch.device

    @torch.no_grad()
    def wait(self) -> dict[str, Tensor]:
        """Wait for the bucket's messages and give its tensors by name. Call once, in bucket order."""
        arrivals = Arrivals(self.run.targets, self.run.dtype, self.device)
        self.run.take_own(self.values, arrivals)
        for message, buffer, exchange in zip(self.run.messages, self.buffers, self.exchanges, strict=True):
            exchange.wait()
            message.unpack(buffer, arrivals)
        self.run.move(self.values, arrivals)
        # A held but empty part arrives from nobody; gradients have a result of every name.
        wanted = [n for n, place in self.run.targets.items() if place.held or not self.run.required]
        return {name: arrivals.make(name) for name in wanted}
