"""Batched send-receive on paper (Hetu v2 section 5.3): which slice goes from whom to whom.

Every receiver gets every slice it lacks from one owner: itself, else the owner on its node that has sent
least within nodes so far, else the owner that has sent least between nodes. Of a partial source every summand
is sent to the receiver, which adds them in the order of their numbers; nothing is reduced on the way. In a
partial target the first summand takes the value and the others are zero. All moves of a plan share the load
counters and travel in one message per ordered pair of ranks. Plans depend on nothing but their arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hetu_fx.annotations.annotation import Annotation, Shape
from hetu_fx.comm_ops.change import Change
from hetu_fx.comm_ops.slices import Dims, Slice, finest_slices
from hetu_fx.errors import AnnotationError, ResolveError


@dataclass(frozen=True, slots=True)
class Move:
    """Asks for a tensor of global `shape` and `itemsize` bytes per entry in another annotation."""

    source: Annotation
    target: Annotation
    shape: Shape
    itemsize: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One slice (global intervals per dim) of one move from a sender to a receiver, who may be the same.

    `adds` says that the receiver adds it to what came before (the second summand and later).
    """

    move: int
    dims: Dims
    numel: int
    sender: int
    receiver: int
    adds: bool


@dataclass(frozen=True, slots=True)
class BsrPlan:
    """Holds all transfers of some moves, in the order in which receivers put them together.

    Pure data, the same on every rank. `outgoing` and `incoming` list a rank's transfers; those of a pair, in
    order, make up its one message.
    """

    moves: tuple[Move, ...]
    transfers: tuple[Transfer, ...]
    outgoing: Mapping[int, Mapping[int, Sequence[Transfer]]] = field(init=False, repr=False, compare=False)
    incoming: Mapping[int, Sequence[Transfer]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        outgoing: dict[int, dict[int, list[Transfer]]] = {}
        incoming: dict[int, list[Transfer]] = {}
        for transfer in self.transfers:
            incoming.setdefault(transfer.receiver, []).append(transfer)
            if transfer.sender != transfer.receiver:
                peers = outgoing.setdefault(transfer.sender, {})
                peers.setdefault(transfer.receiver, []).append(transfer)
        object.__setattr__(self, "outgoing", outgoing)
        object.__setattr__(self, "incoming", incoming)

    @property
    def messages(self) -> list[tuple[int, int, int]]:
        """List (sender, receiver, bytes), by sender and receiver; symbolic dims count as one entry."""
        return [
            (sender, receiver, sum(t.numel * self.moves[t.move].itemsize for t in transfers))
            for sender, peers in sorted(self.outgoing.items())
            for receiver, transfers in sorted(peers.items())
        ]

    def bytes_sent(self, rank: int) -> int:
        """Count the bytes that `rank` sends."""
        return sum(num_bytes for sender, _, num_bytes in self.messages if sender == rank)


class _Loads:
    """Bytes that every rank has sent so far, within its node and to others."""

    def __init__(self, node_of: Callable[[int], int]) -> None:
        self.node_of = node_of
        self.near: defaultdict[int, int] = defaultdict(int)
        self.far: defaultdict[int, int] = defaultdict(int)
        self._neighbours: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def sender(self, owners: tuple[int, ...], receiver: int) -> int:
        """Choose the owner that sends to `receiver`; of equals the first."""
        if receiver in owners:
            return receiver
        near = self._near(owners, self.node_of(receiver))
        return min(near, key=self.near.__getitem__) if near else min(owners, key=self.far.__getitem__)

    def price(self, sender: int, receiver: int) -> tuple[int, int]:
        """Compare transfers: local, then inside a node, then between nodes; then by load."""
        if sender == receiver:
            return 0, 0
        return (1, self.near[sender]) if self._same_node(sender, receiver) else (2, self.far[sender])

    def add(self, sender: int, receiver: int, num_bytes: int) -> None:
        """Count a transfer."""
        if sender != receiver:
            counter = self.near if self._same_node(sender, receiver) else self.far
            counter[sender] += num_bytes

    def _same_node(self, a: int, b: int) -> bool:
        return self.node_of(a) == self.node_of(b)

    def _near(self, owners: tuple[int, ...], node: int) -> tuple[int, ...]:
        key = owners, node
        if key not in self._neighbours:
            self._neighbours[key] = tuple(owner for owner in owners if self.node_of(owner) == node)
        return self._neighbours[key]


def plan_moves(moves: Sequence[Move], *, node_of: Callable[[int], int] = lambda rank: 0) -> BsrPlan:
    """Plan moves together, so that their messages are fused and their load is shared.

    `node_of` gives the node of a rank. Raises ResolveError where an annotation does not fit its shape.
    """
    loads = _Loads(node_of)
    transfers: list[Transfer] = []
    for number, move in enumerate(moves):
        for part in _slices(move):
            for receiver in part.receivers:
                transfers += _transfers(number, move, part, receiver, loads)
    return BsrPlan(tuple(moves), tuple(transfers))


def _slices(move: Move) -> tuple[Slice, ...]:
    change = Change(move.source, move.target, move.shape)
    try:
        return finest_slices(change)
    except AnnotationError as error:
        raise ResolveError(f"cannot move {change}: {error}") from error


def _transfers(number: int, move: Move, part: Slice, receiver: int, loads: _Loads) -> list[Transfer]:
    choices = [[loads.sender(owners, receiver) for owners in copy] for copy in part.owners]
    if len(choices) > 1:
        choices.sort(key=lambda senders: sorted((loads.price(s, receiver) for s in senders), reverse=True))
    senders = choices[0]
    for sender in senders:
        loads.add(sender, receiver, part.numel * move.itemsize)
    return [
        Transfer(number, part.dims, part.numel, sender, receiver, adds=index > 0)
        for index, sender in enumerate(senders)
    ]
