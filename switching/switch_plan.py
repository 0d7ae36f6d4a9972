"""A change of the parameters' home on paper: what travels from whom to whom, in which order, and what that takes.

Values, gradients and optimizer state of a parameter lie alike, so they travel alike; `comm_ops.bsr_plan` chooses their
senders together. Buckets are carried out one after the other, each in one message per pair of ranks, so that a rank
needs little memory beside its state (Malleus moves its state in ten rounds for that).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.bsr_plan import BsrPlan, Move, Transfer, plan_moves
from hetu_fx.comm_ops.bsr_report import least_bytes
from hetu_fx.documents import table_text
from hetu_fx.errors import StateError

FORMAT = "hetu_fx.switch/1"
EXTRA_SHARE = 0.1  # what a bucket may take beside the state of the rank that holds most


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
    def move(self) -> Move:
        """Return what is asked of the planner of messages."""
        return Move(self.source, self.target, self.shape, self.dtype.itemsize)

    def part_bytes(self, at: Annotation, rank: int) -> int:
        """Count the bytes of a rank's part where the tensor lies as `at` says."""
        return math.prod(at.region(rank, self.shape).local_shape) * self.dtype.itemsize if at.holds(rank) else 0

    def stays(self, rank: int) -> bool:
        """Tell whether a rank's part stays as it is."""
        held = self.source.holds(rank), self.target.holds(rank)
        if not all(held):
            return not any(held)
        return self.source.region(rank, self.shape).dims == self.target.region(rank, self.shape).dims


@dataclass(frozen=True, slots=True)
class SwitchBucket:
    """Tensors that travel together; move i of `moves` is that of tensor i."""

    tensors: tuple[StateTensor, ...]
    moves: BsrPlan

    def extra_bytes(self, rank: int) -> int:
        """Count what a rank holds, at most, beside its state: what arrives, and what leaves or is put together."""
        return sum(extra[rank] for extra in extras_of(self.tensors, self.moves.transfers))


@dataclass(frozen=True)
class SwitchPlan:
    """A whole change of home; pure data, the same on every rank.

    Attributes:
        buckets: carried out one after the other.
        state_bytes: what each rank holds of the state, before or after, whichever is more.
    """

    buckets: tuple[SwitchBucket, ...]
    state_bytes: tuple[int, ...]

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """List the tensors that change their home."""
        return tuple(tensor for bucket in self.buckets for tensor in bucket.tensors)

    @cached_property
    def pairs(self) -> Mapping[tuple[int, int], int]:
        """Return the bytes that travel from each sender to each receiver."""
        pairs: Counter[tuple[int, int]] = Counter()
        for sender, receiver, num_bytes in self._messages():
            pairs[sender, receiver] += num_bytes
        return dict(sorted(pairs.items()))

    @property
    def num_messages(self) -> int:
        """Return the number of messages: one per bucket and pair of ranks."""
        return sum(1 for _ in self._messages())

    @property
    def total_bytes(self) -> int:
        """Return the bytes that travel."""
        return sum(self.pairs.values())

    @cached_property
    def least_bytes(self) -> int:
        """Return the bytes that receivers lack: no plan can do with less."""
        return sum(least_bytes(tensor.move) for tensor in self.tensors)

    @cached_property
    def peak_extra_bytes(self) -> int:
        """Return what a rank holds, at most, beside its state while the change goes on."""
        ranks = range(len(self.state_bytes))
        return max((bucket.extra_bytes(rank) for bucket in self.buckets for rank in ranks), default=0)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object; dims are intervals of the global tensor."""
        return {
            "format": FORMAT,
            "bytes": self.total_bytes,
            "least_bytes": self.least_bytes,
            "messages": self.num_messages,
            "state_bytes": list(self.state_bytes),
            "peak_extra_bytes": self.peak_extra_bytes,
            "pairs": [{"sender": a, "receiver": b, "bytes": size} for (a, b), size in self.pairs.items()],
            "buckets": [_bucket_json(bucket) for bucket in self.buckets],
        }

    def summary(self) -> str:
        """Return the plan on one line."""
        return (
            f"{len(self.tensors)} tensors in {len(self.buckets)} buckets: {self.total_bytes / 1e6:.4g} MB in "
            f"{self.num_messages} messages ({self.least_bytes / 1e6:.4g} MB are lacking), at most "
            f"{self.peak_extra_bytes / 1e6:.4g} MB beside a state of {max(self.state_bytes, default=0) / 1e6:.4g} MB"
        )

    def __str__(self) -> str:
        rows = [[str(a), str(b), f"{size / 1e6:.4g}"] for (a, b), size in self.pairs.items()]
        return f"{self.summary()}\n{table_text(['sender', 'receiver', 'MB'], rows)}" if rows else self.summary()

    def _messages(self) -> Iterator[tuple[int, int, int]]:
        return (message for bucket in self.buckets for message in bucket.moves.messages)


def plan_switch(
    tensors: Sequence[StateTensor],
    world: int,
    *,
    node_of: Callable[[int], int] = lambda rank: 0,
    extra_share: float = EXTRA_SHARE,
) -> SwitchPlan:
    """Plan a change of home; a pure function, the same on every rank.

    Args:
        tensors: all of the state; those that stay count for its size only.
        world: number of ranks.
        node_of: gives the node of a rank; messages inside a node are preferred.
        extra_share: what a bucket may take, as a part of the state of the rank that holds most; one tensor may more.

    Raises:
        StateError: a share that is not above 0, or a tensor named twice.
    """
    if extra_share <= 0:
        raise StateError(f"extra_share is {extra_share}; give a part of the state above 0, such as {EXTRA_SHARE}")
    names = Counter((tensor.parameter, tensor.kind) for tensor in tensors)
    if len(names) < len(tensors):
        raise StateError(f"{max(names, key=names.__getitem__)} stands in the state more than once")
    state = tuple(
        max(sum(t.part_bytes(t.source, rank) for t in tensors), sum(t.part_bytes(t.target, rank) for t in tensors))
        for rank in range(world)
    )
    moving = [tensor for tensor in tensors if tensor.source != tensor.target]
    together = plan_moves([tensor.move for tensor in moving], node_of=node_of)
    groups = _filled(extras_of(moving, together.transfers), int(max(state, default=0) * extra_share))
    return SwitchPlan(tuple(_bucket(moving, together.transfers, group) for group in groups), state)


def extras_of(tensors: Sequence[StateTensor], transfers: Sequence[Transfer]) -> list[Counter[int]]:
    """Count for each tensor what every rank holds beside its state while the tensor is brought over.

    What arrives is there until the new part has been put together; messages that leave have left by then.
    """
    arriving: list[Counter[int]] = [Counter() for _ in tensors]
    leaving: list[Counter[int]] = [Counter() for _ in tensors]
    for transfer in transfers:
        if transfer.sender != transfer.receiver:
            num_bytes = transfer.numel * tensors[transfer.move].dtype.itemsize
            arriving[transfer.move][transfer.receiver] += num_bytes
            leaving[transfer.move][transfer.sender] += num_bytes
    extras = []
    for number, tensor in enumerate(tensors):
        ranks = sorted({*tensor.source.ranks, *tensor.target.ranks})
        new = {rank: 0 if tensor.stays(rank) else tensor.part_bytes(tensor.target, rank) for rank in ranks}
        sizes = {rank: arriving[number][rank] + max(leaving[number][rank], new[rank]) for rank in ranks}
        extras.append(Counter(sizes))
    return extras


def _filled(extras: Sequence[Counter[int]], limit: int) -> list[list[int]]:
    """Put tensors in few buckets, largest first, each in the first bucket that has room for it on every rank."""
    largest = [max(extra.values(), default=0) for extra in extras]
    loads: list[Counter[int]] = []
    groups: list[list[int]] = []
    for number in sorted(range(len(extras)), key=lambda number: (-largest[number], number)):
        extra = extras[number]
        fits = (all(load[rank] + size <= limit for rank, size in extra.items()) for load in loads)
        place = next((index for index, fit in enumerate(fits) if fit), len(loads))
        if place == len(loads):
            loads.append(Counter())
            groups.append([])
        loads[place].update(extra)
        groups[place].append(number)
    return [sorted(group) for group in groups]


def _bucket(tensors: Sequence[StateTensor], transfers: Sequence[Transfer], group: Sequence[int]) -> SwitchBucket:
    place = {number: index for index, number in enumerate(group)}
    members = tuple(tensors[number] for number in group)
    own = tuple(replace(t, move=place[t.move]) for t in transfers if t.move in place)
    return SwitchBucket(members, BsrPlan(tuple(tensor.move for tensor in members), own))


def _bucket_json(bucket: SwitchBucket) -> list[dict[str, Any]]:
    transfers: list[list[dict[str, Any]]] = [[] for _ in bucket.tensors]
    for transfer in bucket.moves.transfers:
        if transfer.sender != transfer.receiver:
            dims = [[list(interval) for interval in intervals] for intervals in transfer.dims]
            transfers[transfer.move].append({"dims": dims, "sender": transfer.sender, "receiver": transfer.receiver})
    return [
        {
            "parameter": tensor.parameter,
            "kind": tensor.kind,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "source": str(tensor.source),
            "target": str(tensor.target),
            "transfers": sent,
        }
        for tensor, sent in zip(bucket.tensors, transfers, strict=True)
    ]
