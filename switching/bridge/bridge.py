"""The bridge between home and compute parameters: values there once per step, gradients back.

What travels how is decided by `plan_bridge`; this module carries it out on one rank. Where home and compute
coincide the memory is shared and nothing moves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.device_types import HOST
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.plans.cost import BUCKET_BYTES, BUCKETS_AT_ONCE
from hetu_fx.comm_ops.plans.slices import finest_slices
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.collectives import Exchange
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import StateError
from hetu_fx.switching.bridge.bridge_plan import BridgeBucket, BridgeEntry, BridgePlan, plan_bridge, slice_boxes
from hetu_fx.switching.bridge.message import Arrivals, Cuts, MessageRun, box_cuts, view_box
from hetu_fx.switching.home.layout import LocalPart

__all__ = ["Bridge", "BridgeBucket", "BridgeEntry", "BridgePlan", "Reduction", "plan_bridge"]


class Bridge:
    """Brings parameters from home to where they are computed with, and gradients home.

    Made alike on all ranks of `table`; every call is collective over them. `lowering` chooses the form of its messages
    (None: the cheapest on the links of `table`). `is_outdated` is set where parameters have got other homes since.
    `reduced_with` is how many reduce buckets have to be started for the gradients of each unit to be under way,
    `most_of_unit` the most that a unit has.
    `reduce_buckets` has the names of the parameters of each reduce bucket, in order, `reduce_bucket_of` the number of
    each parameter's, `early` those whose gradients may travel before the last one of this rank is there.
    """

    def __init__(
        self,
        entries: Sequence[BridgeEntry],
        table: GroupTable,
        bucket_bytes: int = BUCKET_BYTES,
        lowering: Lowering | None = None,
    ) -> None:
        self.plan = _planned(tuple(entries), bucket_bytes)
        self.is_outdated = False
        units = {entry.unit for entry in self.plan.entries}
        self.reduced_with = {unit: sum(bucket.unit >= unit for bucket in self.plan.reduces) for unit in units}
        self.most_of_unit = max(Counter(bucket.unit for bucket in self.plan.reduces).values(), default=1)
        self.reduce_buckets = tuple(bucket.names for bucket in self.plan.reduces)
        self.reduce_bucket_of = {name: number for number, names in enumerate(self.reduce_buckets) for name in names}
        self.early = frozenset(name for names in self.reduce_buckets[:-1] for name in names)
        lowering = lowering or Lowering(table.topology)
        self.table = table
        self._device, self._has_met = torch.device("cpu"), False
        gathers = {e.name: TensorMove(e.home, e.compute, e.shape, e.dtype.itemsize) for e in entries}
        reduces = {e.name: TensorMove(e.gradient, e.home, e.shape, e.dtype.itemsize) for e in entries}
        self._gathers = [
            BucketRun(table, bucket, gathers, tag, lowering, required=True)
            for tag, bucket in enumerate(self.plan.gathers)
        ]
        self._reduces = [
            BucketRun(table, bucket, reduces, tag, lowering, required=False)
            for tag, bucket in enumerate(self.plan.reduces, len(self.plan.gathers))  # both may be under way
        ]
        self._gathers_nothing = not any(run.messages or run.moved or run.copied for run in self._gathers)

    @property
    def sends_gradients(self) -> bool:
        """Whether any gradient of this rank travels, or arrives."""
        return any(run.messages or run.moved for run in self._reduces)

    @property
    def names(self) -> frozenset[str]:
        """The parameters that it brings."""
        return frozenset(entry.name for entry in self.plan.entries)

    def shares(self, pieces: Mapping[str, Tensor]) -> bool:
        """Tell whether what `gather` returns is these pieces, where they stand: nothing moves."""
        return self._gathers_nothing and all(pieces[e.name].dtype is e.dtype for e in self.plan.entries)

    def gather(self, pieces: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Turn this rank's home pieces into its compute parameters (names that it reads only).

        Casts to the entries' dtypes. A result shares memory with its piece where they coincide. Others are written to
        the tensors of an earlier call, `into`, if these are given; what is moved is always new. Raises StateError
        where a piece is missing, CommError where a peer is.
        """
        return self._run(self._gathers, pieces, into)

    def begin_unit(self, unit: int, pieces: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> BucketsUnderWay:
        """Start what `gather` does, for the parameters of one unit."""
        pairs = zip(self._gathers, self.plan.gathers, strict=True)
        return self._begin([run for run, bucket in pairs if bucket.unit == unit], pieces, into)

    def arriving(self) -> Mapping[str, torch.Size]:
        """Return the sizes on this rank of what `gather` writes: what it reads and does not have at home so."""
        named = [(name, run) for run in self._gathers for name in run.wanted if name not in run.kept]
        return {name: torch.Size(run.targets[name].local_shape) for name, run in named}

    def kept(self) -> frozenset[str]:
        """Return what `gather` gives as it is at home."""
        return frozenset(name for run in self._gathers for name in run.wanted if name in run.kept)

    def reduce(self, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Turn this rank's gradients of compute parameters into gradients of its home pieces, for all trained names.

        A gradient that is None or absent counts as zeros. Gradients may be written to and given back.
        """
        return self._run(self._reduces, grads)

    def meet(self) -> None:
        """Make the process groups that gradients travel in; collective, and nothing once they are there.

        That waits for peers, which must not happen amid a pipeline's schedule: a rank that begins to send the gradient
        of a tied parameter home would wait for one that waits for its cotangents.
        """
        if not self._has_met:
            with using(self.table):
                for run in self._reduces:
                    run.meet(self._device)
            self._has_met = True

    def reduce_start(self, number: int, grads: Mapping[str, Tensor | None]) -> Handle:
        """Start one reduce bucket, whose gradients are ready; all ranks start all buckets in order."""
        return self._start(self._reduces[number], grads)

    def _start(
        self, run: BucketRun, tensors: Mapping[str, Tensor | None], into: Mapping[str, Tensor] | None = None
    ) -> Handle:
        given = next((tensor for tensor in tensors.values() if tensor is not None), None)
        if given is not None:
            self._device = given.device  # remembered for buckets of which this rank has nothing
        if run.stays:
            return run.at_home(tensors, self._device)
        with using(self.table):
            return run.start(tensors, self._device, into)

    def _run(
        self,
        runs: Sequence[BucketRun],
        tensors: Mapping[str, Tensor | None],
        into: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        return self._begin(runs, tensors, into).wait()

    def _begin(
        self, runs: Sequence[BucketRun], tensors: Mapping[str, Tensor | None], into: Mapping[str, Tensor] | None
    ) -> BucketsUnderWay:
        return BucketsUnderWay(runs, lambda run: self._start(run, tensors, into))


class Reduction:
    """Reduces gradients as they become ready, so that their messages travel beside the rest of the backward.

    Making the first one of a bridge is collective.

    Buckets start in their fixed order, each as soon as the gradients that this rank has for it (`expected`, by
    name) are there; `start` starts what is left, `finish` waits for all.

    `most` is how many buckets are under way at once (None: any number). The oldest is waited for before another one is
    packed beyond it, so that what it was packed from and into is let go while others are still to come. Ranks must not
    wait for each other for anything else meanwhile, such as sums in the middle of the model.
    """

    def __init__(self, bridge: Bridge, expected: Collection[str], most: int | None = None) -> None:
        bridge.meet()
        self._bridge = bridge
        self._ready: dict[str, Tensor | None] = {}
        self._most = most
        self._open = [set(names).intersection(expected) for names in bridge.reduce_buckets]  # awaited for each bucket
        self._under_way: deque[Handle] = deque()
        self._started = 0
        self._results: dict[str, Tensor] = {}

    def ready(self, name: str, grad: Tensor | None) -> None:
        """Hand in a gradient of this step, once per parameter; it is final and belongs to the bridge now."""
        self._ready[name] = grad
        self._open[self._bridge.reduce_bucket_of[name]].discard(name)
        while self._started < len(self._open) and not self._open[self._started]:
            self._start_next()

    def start(self, last: dict[str, Tensor] | None = None, end: int | None = None) -> None:
        """Start what is left up to bucket `end` (None: all), with zeros for gradients that never came.

        `last` are those that have not been handed in; it is emptied, so that each is let go once it is packed.
        """
        if last is not None:
            self._ready.update(last)
            last.clear()
        while self._started < (len(self._bridge.reduce_buckets) if end is None else end):
            self._start_next()

    def finish(self, last: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Start what is left, wait for all, and give the gradients of the home pieces by name; `last` as in `start`."""
        self.start(last)
        self.settle()
        results, self._results = self._results, {}
        return results

    def settle(self) -> None:
        """Start what is left, and wait for all; `finish` gives what that brings, if it is still wanted."""
        self.start()
        while self._under_way:  # a bucket's buffers go before the next one's results are made
            self._results |= self._under_way.popleft().wait()

    def abandon(self) -> None:
        """Wait for what is under way, so that no later message is taken for one of it, and forget what it brings."""
        while self._under_way:
            self._under_way.popleft().wait()
        self._results.clear()

    def _start_next(self) -> None:
        if len(self._under_way) == self._most:
            self._results |= self._under_way.popleft().wait()
        number, self._started = self._started, self._started + 1
        names = self._bridge.reduce_buckets[number]
        self._under_way.append(self._bridge.reduce_start(number, {name: self._ready.pop(name, None) for name in names}))


@lru_cache(maxsize=2)
def _planned(entries: tuple[BridgeEntry, ...], bucket_bytes: int) -> BridgePlan:
    """Plan once where ranks are threads of one process."""
    return plan_bridge(entries, bucket_bytes)


class BucketRun:
    """One rank's side of one bucket, in one direction: pack, start, wait, unpack. `moves` has those of its names.

    `required` says that every held tensor must be given (home pieces); else a missing one is zeros
    (gradients), and every name has a result, be it empty.
    """

    def __init__(
        self,
        table: GroupTable,
        bucket: BridgeBucket,
        moves: Mapping[str, TensorMove],
        tag: int,
        lowering: Lowering,
        *,
        required: bool,
    ) -> None:
        rank = table.rank
        self.table, self.dtype, self.required = table, bucket.dtype, required
        own = {name: moves[name] for name in bucket.names}
        self.sources = {name: LocalPart(move.source, move.shape, rank) for name, move in own.items()}
        self.targets = {name: LocalPart(move.target, move.shape, rank) for name, move in own.items()}
        self.messages = [
            MessageRun(message, table, self.sources, self.targets, tag, lowering)
            for message in bucket.messages
            if rank in message.lane.ranks
        ]
        self.moved = bucket.moved
        self.moves = plan_moves([own[name] for name in bucket.moved])
        told = {slot.name for message in self.messages for slot in message.unpacked}
        still = [name for name in bucket.names if name not in bucket.moved]
        self.kept = {name for name in still if name not in told and own[name].stays(rank)}
        self.copied = [(n, *cuts) for n in still if n not in self.kept for cuts in self._own(n, own[n], rank)]
        # A held but empty part arrives from nobody; gradients have a result of every name.
        self.wanted = dict.fromkeys(n for n, place in self.targets.items() if place.held or not required)
        self._stay = [name for name in self.wanted if name in self.kept]  # what this rank has before and after
        self.needed_later = {*self.kept, *(name for name, *_ in self.copied), *self.moved}
        self.stays = not (self.messages or self.moved or self.copied)  # what is not kept is empty here
        self._empty: tuple[torch.device, dict[str, Tensor]] | None = None

    def _own(self, name: str, move: TensorMove, rank: int) -> list[tuple[Cuts, Cuts]]:
        """List what this rank takes from itself: (cuts of the source, cuts of the target)."""
        boxes = [
            box
            for part in finest_slices(Transition(move.source, move.target, move.shape))
            if rank in part.receivers and any(len(copy) == 1 and rank in copy[0] for copy in part.owners)
            for box in slice_boxes(part)
        ]
        return [(box_cuts(self.sources[name], box), box_cuts(self.targets[name], box)) for box in boxes]

    def meet(self, device: torch.device) -> None:
        """Make the process groups of the messages; collective over the ranks of each, in the order of all buckets."""
        for message in self.messages:
            on_host = self._place(message, device) == HOST
            message.meet(self.dtype.itemsize, on_host=on_host)

    def at_home(self, tensors: Mapping[str, Tensor | None], device: torch.device) -> NoCommBucket:
        """Return the tensors of a bucket that `stays`: all are where they are wanted.

        Gradients are taken as they are: autograd gives them the shape and the dtype of the leaves that they are of.
        """
        values = {name: tensors.get(name) for name in self._stay}
        if self.required:
            values = {name: self._value(name, value) for name, value in values.items()}
        missing = [name for name, value in values.items() if value is None]
        if missing:
            arrivals = Arrivals(self.targets, self.dtype, device)
            values.update((name, arrivals.make(name).zero_()) for name in missing)
        return NoCommBucket(
            self._nothing(device) | {name: value for name, value in values.items() if value is not None}
        )

    def _nothing(self, device: torch.device) -> dict[str, Tensor]:
        """Return the empty results of what it does not have, the same ones each time."""
        if self._empty is None or self._empty[0] != device:
            arrivals = Arrivals(self.targets, self.dtype, device)
            self._empty = device, {name: arrivals.make(name) for name in self.wanted if name not in self.kept}
        return self._empty[1]

    @torch.no_grad()
    def start(
        self, tensors: Mapping[str, Tensor | None], device: torch.device, into: Mapping[str, Tensor] | None = None
    ) -> BucketUnderWay:
        """Pack this rank's tensors and start the messages, whose results are written to `into`, by name, if given.

        Raises StateError for a missing or misfit tensor.
        """
        values = {name: self._value(name, tensors.get(name)) for name in self.sources}
        empties = {at: torch.empty(0, dtype=self.dtype, device=at) for at in (device, HOST)}
        arrivals = Arrivals(self.targets, self.dtype, device, into)
        begun = [message.begin(values, empties[self._place(message, device)], arrivals) for message in self.messages]
        values = {name: value for name, value in values.items() if name in self.needed_later}  # the others are packed
        return BucketUnderWay(self, values, begun, arrivals)

    def _place(self, message: MessageRun, device: torch.device) -> torch.device:
        """Return where the buffer of a message stands."""
        return HOST if self.table.is_staged(device, message.lane.ranks) else device

    def _value(self, name: str, tensor: Tensor | None) -> Tensor | None:
        place = self.sources[name]
        if not place.held or tensor is None:
            if place.held and self.required:
                raise StateError(f"rank {self.table.rank} has a home piece of {name!r}, but none was given")
            return None
        if tensor.shape != place.local_shape:
            raise StateError(
                f"rank {self.table.rank} holds {name!r} in shape {place.local_shape}, got {tuple(tensor.shape)}"
            )
        if tensor.requires_grad:
            tensor = tensor.detach()
        return tensor if tensor.dtype is self.dtype else tensor.to(self.dtype)

    def take_own(self, values: Mapping[str, Tensor | None], arrivals: Arrivals) -> None:
        """Put in what this rank has itself."""
        for name in self.kept:
            value = values[name]
            arrivals.tensors[name] = arrivals.make(name).zero_() if value is None else value
        for name, source, target in self.copied:
            value, result = values[name], view_box(arrivals.make(name), target)
            if value is None:
                result.zero_()
            else:
                result.copy_(view_box(value, source))

    def move(self, values: Mapping[str, Tensor | None], arrivals: Arrivals) -> None:
        """Bring over what goes by batched send-receive."""
        if not self.moved:
            return
        like = torch.empty(0, dtype=self.dtype, device=arrivals.device)
        tensors: list[Tensor | None] = []
        for name in self.moved:
            value, place = values[name], self.sources[name]
            tensors.append(like.new_zeros(place.local_shape) if value is None and place.held else value)
        found = run_moves(self.moves, tensors, self.table, like=[like] * len(tensors))
        for name, result in zip(self.moved, found, strict=True):
            if result is not None:
                arrivals.tensors[name] = result


@dataclass(slots=True)
class NoCommBucket:
    """A bucket of which nothing travels."""

    tensors: dict[str, Tensor]

    def wait(self) -> dict[str, Tensor]:
        """Give its tensors by name."""
        return self.tensors


@dataclass(slots=True)
class BucketUnderWay:
    """A bucket under way; `wait` ends it."""

    run: BucketRun
    values: dict[str, Tensor | None]
    begun: list[tuple[Flat | None, Exchange[Any]]]
    arrivals: Arrivals

    @torch.no_grad()
    def wait(self) -> dict[str, Tensor]:
        """Wait for the bucket's messages and give its tensors by name. Call once, in bucket order."""
        arrivals = self.arrivals
        self.run.take_own(self.values, arrivals)
        for message, (buffer, exchange) in zip(self.run.messages, self.begun, strict=True):
            exchange.wait()
            if buffer is not None:
                message.unpack(buffer, arrivals)
        self.run.move(self.values, arrivals)
        return {name: arrivals.make(name) for name in self.run.wanted}


Handle = NoCommBucket | BucketUnderWay
"""A bucket that was started."""


class BucketsUnderWay:
    """Buckets that run one after another, some at once: as many of them are started at first."""

    def __init__(self, runs: Sequence[BucketRun], start: Callable[[BucketRun], Handle]) -> None:
        self._start, self._left, self._under_way = start, deque(runs), deque[Handle]()
        self._go_on()

    def _go_on(self) -> None:
        while self._left and len(self._under_way) < BUCKETS_AT_ONCE:
            self._under_way.append(self._start(self._left.popleft()))

    def wait(self) -> dict[str, Tensor]:
        """Run all, and give their tensors by name; once."""
        results: dict[str, Tensor] = {}
        while self._under_way:
            results |= self._under_way.popleft().wait()
            self._go_on()
        return results
