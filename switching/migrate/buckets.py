"""The state's tensors in buckets: what is brought over together, so that all that it takes stays below a bound.

While a bucket's messages travel, those before it are put together and those after it are packed. So a rank holds, at
most and beside its state, what leaves of three buckets (others may read it where it is packed), what arrives of two,
and new parts of one. Where all ranks read messages where they are packed, nothing travels: a rank holds what leaves of
two buckets, and new parts of one. Where all ranks read each other's parts, slices of few runs are not packed either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.region import length
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, SliceTransfer, TensorMove, cut_evenly
from hetu_fx.comm_ops.wire.packing import packed_bytes
from hetu_fx.errors import StateError
from hetu_fx.switching.migrate.byte_runs import in_long_runs

ARRIVING, LEAVING, NEW = USES = "arriving", "leaving", "new"


class Carrier(StrEnum):
    """How slices get to other ranks.

    SENT: in messages. SHARED: in messages that all ranks read where they are packed. DIRECT: all ranks read them in
    the sender's part, without a message; those in many short runs are packed as for SHARED.
    """

    SENT = "sent"
    SHARED = "shared"
    DIRECT = "direct"

    @property
    def rooms(self) -> Mapping[str, int]:
        """Tell for how many buckets' messages a rank has room at once."""
        return _ROOMS[self]

    def packs(self, move: TensorMove, transfer: SliceTransfer) -> bool:
        """Tell whether a slice is packed in a message, or, if its rank keeps it, copied as it would be there."""
        return self is not Carrier.DIRECT or not in_long_runs(move, transfer)


_ROOMS: Mapping[Carrier, Mapping[str, int]] = {
    Carrier.SENT: {ARRIVING: 2, LEAVING: 3},
    Carrier.SHARED: {LEAVING: 2},
    Carrier.DIRECT: {LEAVING: 2},
}


VALUE, GRADIENT = "value", "gradient"
"""What a tensor is of its parameter; other kinds are of an optimizer's state."""

_PART = 5  # of the bound: what new parts and messages may take at least

Load = Counter[tuple[str, int]]
"""Bytes by what they are for, and by rank."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of the training state: where its parts lie before and after.

    `kind` says what it is of its parameter: "value", "gradient", or an optimizer's state by its name. `shape` is
    global.
    """

    parameter: str
    kind: str
    dtype: torch.dtype
    source: Annotation
    target: Annotation
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.source.has_partial or self.target.has_partial:
            raise StateError(
                f"{self.kind} of {self.parameter!r} cannot have summands at home: {self.source} before, {self.target} "
                f"after"
            )

    @property
    def is_late(self) -> bool:
        """Tell whether a step reads it at its end only: the optimizer alone uses it."""
        return self.kind not in (VALUE, GRADIENT)

    @property
    def move(self) -> TensorMove:
        """Return what is asked of the planner of messages."""
        return TensorMove(self.source, self.target, self.shape, self.dtype.itemsize)

    def part_bytes(self, at: Annotation, rank: int) -> int:
        """Count the bytes of a rank's part where the tensor lies as `at` says."""
        return math.prod(at.region(rank, self.shape).local_shape) * self.dtype.itemsize if at.holds(rank) else 0


@dataclass(frozen=True, slots=True)
class SwitchBucket:
    """Tensors that travel together, or one part of them; move i of `moves` is that of tensor i.

    `completes` says that it is the last part: the tensors are at their new home after it, and as before until then.
    `packed` and `direct` share its transfers, what ranks keep included: those in messages, and those that receivers
    read in the senders' parts.
    """

    tensors: tuple[StateTensor, ...]
    moves: BsrPlan
    completes: bool = True
    transport: Carrier = Carrier.SENT
    packed: BsrPlan = field(init=False, repr=False, compare=False)
    direct: BsrPlan = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shares: dict[bool, list[SliceTransfer]] = {True: [], False: []}
        for transfer in self.moves.transfers:
            shares[self.transport.packs(self.moves.moves[transfer.move], transfer)].append(transfer)
        object.__setattr__(self, "packed", replace(self.moves, transfers=tuple(shares[True])))
        object.__setattr__(self, "direct", replace(self.moves, transfers=tuple(shares[False])))

    @property
    def load(self) -> Load:
        """Count what every rank holds for this bucket beside its state."""
        return sum(_transfer_loads(self.tensors, self.packed.transfers), Counter())

    def leaving(self, rank: int) -> dict[int, int]:
        """Count the bytes of the message to each receiver, padding included; in the order in which they are packed."""
        sent = self.packed.outgoing.get(rank, {})
        itemsize = [tensor.dtype.itemsize for tensor in self.tensors]
        return {
            receiver: sum(packed_bytes((transfer.numel,), itemsize[transfer.move]) for transfer in transfers)
            for receiver, transfers in sorted(sent.items())
        }

    def message_bytes(self) -> int:
        """Count what the busiest rank needs room for: all that it sends or receives."""
        return max((num_bytes for (what, _), num_bytes in self.load.items() if what in self.transport.rooms), default=0)


def _transfer_loads(tensors: Sequence[StateTensor], packed: Sequence[SliceTransfer]) -> list[Load]:
    """Count for each tensor what every rank holds beside its state while the tensor is brought over.

    Its new part stands beside the old one until all of it has arrived everywhere, unless it is the old one.
    """
    loads: list[Load] = [Counter() for _ in tensors]
    for transfer in packed:
        if transfer.sender != transfer.receiver:
            num_bytes = transfer.numel * tensors[transfer.move].dtype.itemsize
            loads[transfer.move][ARRIVING, transfer.receiver] += num_bytes
            loads[transfer.move][LEAVING, transfer.sender] += num_bytes
    for tensor, load in zip(tensors, loads, strict=True):
        for rank in tensor.target.ranks:
            load[NEW, rank] = 0 if tensor.move.stays(rank) else tensor.part_bytes(tensor.target, rank)
    return loads


def peak_bytes(buckets: Sequence[SwitchBucket]) -> Counter[int]:
    """Count what every rank holds, at most, beside its state while buckets are brought over one after the other.

    Room for messages is used again some buckets later, and is as large as the largest of those.
    """
    most: Load = Counter()
    for number, bucket in enumerate(buckets):
        numbers = {NEW: 1, **bucket.transport.rooms}
        for (what, rank), num_bytes in bucket.load.items():
            if what in numbers:
                room = f"{what} {number % numbers[what]}"
                most[room, rank] = max(most[room, rank], num_bytes)
    peaks: Counter[int] = Counter()
    for (_, rank), num_bytes in most.items():
        peaks[rank] += num_bytes
    return peaks


def fill_buckets(
    tensors: Sequence[StateTensor], transfers: Sequence[SliceTransfer], limit: int, transport: Carrier = Carrier.SENT
) -> tuple[SwitchBucket, ...]:
    """Put tensors in buckets that take `limit` bytes of a rank beside its state.

    Nothing may be lost where a rank fails, so that a tensor's old part must stay until the new one is whole. Where the
    largest new part takes nearly the limit or more, a rank takes that, and a fifth of the limit for messages: those
    are cut so that each part of them brings over a part of the bucket.
    """
    loads = _transfer_loads(tensors, [t for t in transfers if transport.packs(tensors[t.move].move, t)])
    largest = {
        what: max((n for load in loads for key, n in load.items() if key[0] == what), default=0) for what in USES
    }
    new = max(_for_new_parts(loads, limit, transport), largest[NEW])
    messages = max(limit - new, limit // _PART) // sum(transport.rooms.values())
    limits = {NEW: new} | {what: max(messages, largest[what]) for what in transport.rooms}
    groups = _filled(loads, limits)
    return tuple(bucket for group in groups for bucket in _buckets(tensors, transfers, group, messages, transport))


def _for_new_parts(loads: Sequence[Load], limit: int, transport: Carrier) -> int:
    """Return how much of the limit new parts may take: as much as they are of all that a rank needs room for."""
    needs: Counter[str] = Counter()
    for (what, _), num_bytes in sum(loads, Counter()).items():
        needs[what] = max(needs[what], num_bytes)
    messages = sum(number * needs[what] for what, number in transport.rooms.items())
    if not messages:
        return limit
    share = limit * needs[NEW] // (needs[NEW] + messages)
    return min(max(share, limit // _PART), limit - limit // _PART)


def _filled(loads: Sequence[Load], limits: Mapping[str, int]) -> list[list[int]]:
    """Put tensors in few groups, largest first, each in the first group that has room for it on every rank."""
    largest = [max(load.values(), default=0) for load in loads]
    filled: list[Load] = []
    groups: list[list[int]] = []
    for number in sorted(range(len(loads)), key=lambda number: (-largest[number], number)):
        load = loads[number]
        counted = [(key, size) for key, size in load.items() if key[0] in limits]
        fits = (all(taken[key] + size <= limits[key[0]] for key, size in counted) for taken in filled)
        place = next((index for index, fit in enumerate(fits) if fit), len(filled))
        if place == len(filled):
            filled.append(Counter())
            groups.append([])
        filled[place].update(load)
        groups[place].append(number)
    return [sorted(group) for group in groups]


def _buckets(
    tensors: Sequence[StateTensor],
    transfers: Sequence[SliceTransfer],
    group: Sequence[int],
    limit: int,
    transport: Carrier,
) -> list[SwitchBucket]:
    """Make the buckets of one group: as many as its messages need to stay below the limit, if they can be cut so."""
    place = {number: index for index, number in enumerate(group)}
    members = tuple(tensors[number] for number in group)
    moves = tuple(tensor.move for tensor in members)
    own = [replace(t, move=place[t.move]) for t in transfers if t.move in place]
    packed = [transport.packs(moves[t.move], t) for t in own]
    longest = max((length(dim) for t, cut in zip(own, packed, strict=True) if cut for dim in t.dims), default=1)
    count = 1
    while True:
        parts = _parts(own, packed, count)
        buckets = [SwitchBucket(members, BsrPlan(moves, part), part is parts[-1], transport) for part in parts]
        excess = max((bucket.message_bytes() for bucket in buckets), default=0) / max(limit, 1)
        if excess <= 1 or count >= longest:
            return buckets
        count = min(max(math.ceil(count * excess), count + 1), longest)


def _parts(transfers: Sequence[SliceTransfer], packed: Sequence[bool], count: int) -> list[tuple[SliceTransfer, ...]]:
    """Cut every packed transfer in `count` chunks, or fewer if it is small, and share all out evenly; in order."""
    parts: list[list[SliceTransfer]] = [[] for _ in range(count)]
    for number, (transfer, is_packed) in enumerate(zip(transfers, packed, strict=True)):
        for index, dims in enumerate(cut_evenly(transfer.dims, count if is_packed else 1)):
            chunk = replace(transfer, dims=dims, numel=math.prod(map(length, dims)))
            parts[(number + index) % count].append(chunk)
    return [tuple(part) for part in parts]
