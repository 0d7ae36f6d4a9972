"""One rank's work for one bucket of the bridge: pack, start, wait, unpack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.plans.slices import finest_slices
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.collectives import Exchange
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.bridge.message import Arrivals, Cuts, LocalTensor, MessageRun, narrowed
from hetu_fx.switching.bridge.plan import BridgeBucket, boxes_of


@dataclass(frozen=True, slots=True)
class Crossing:
    """One parameter's way over the bridge in one direction."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Annotation
    target: Annotation


class BucketRun:
    """One rank's side of one bucket, in one direction.

    `required` says that every held tensor must be given (home pieces); else a missing one is zeros
    (gradients), and every name has a result, be it empty.
    """

    def __init__(
        self,
        table: GroupTable,
        bucket: BridgeBucket,
        crossings: Sequence[Crossing],
        tag: int,
        lowering: Lowering,
        *,
        required: bool,
    ) -> None:
        rank = table.rank
        self.table, self.dtype, self.required = table, bucket.dtype, required
        self.sources = {c.name: LocalTensor(c.source, c.shape, rank) for c in crossings}
        self.targets = {c.name: LocalTensor(c.target, c.shape, rank) for c in crossings}
        self.messages = [
            MessageRun(message, rank, self.sources, self.targets, tag, lowering)
            for message in bucket.messages
            if rank in message.lane.ranks
        ]
        moved = [c for c in crossings if c.name in bucket.moved]
        self.moved = tuple(c.name for c in moved)
        self.moves = plan_moves([TensorMove(c.source, c.target, c.shape, c.dtype.itemsize) for c in moved])
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
            for part in finest_slices(Transition(crossing.source, crossing.target, crossing.shape))
            if rank in part.receivers and any(len(copy) == 1 and rank in copy[0] for copy in part.owners)
            for box in boxes_of(part)
        ]
        return [(source.cuts(box), target.cuts(box)) for box in boxes]

    def meet(self, device: torch.device) -> None:
        """Make the process groups of the messages; collective over the ranks of each, in the order of all buckets."""
        on_host = device.type == "cpu" or self.table.staged(device)
        for message in self.messages:
            message.meet(self.table, self.dtype.itemsize, on_host=on_host)

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
