"""Batched send-receive on paper (Hetu v2 section 5.3): which slice goes from whom to whom.

Every receiver gets every slice it lacks from one owner: itself, else the owner on its node that has sent least within
nodes so far, else the owner that has sent least between nodes. Of a partial source every summand is sent to
the receiver, which adds them in the order of their numbers. In a partial target the first summand
takes the value and the others are zero. All moves of a plan share the load counters and travel in one message
per ordered pair of ranks. Plans depend on nothing but their arguments.

With relays a slice that several receivers would all get from afar (none of them owns it, nor anyone on their
node: H2's slice-send then gather), or all get as summands, is cut in as many chunks as there are receivers:
each gets and sums its own chunk, and passes it on in a second round. `plan_on_links` takes what is cheaper.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetu_fx.annotations.annotation import Annotation, Shape
from hetu_fx.annotations.region import length, merge, select
from hetu_fx.comm_ops.plans.cost import Topology, rounds_cost
from hetu_fx.comm_ops.plans.slices import Dims, Slice, finest_slices, least_entries
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.errors import AnnotationError, ResolveError


@dataclass(frozen=True, slots=True)
class TensorMove:
    """Asks for a tensor of global `shape` and `itemsize` bytes per entry in another annotation."""

    source: Annotation
    target: Annotation
    shape: Shape
    itemsize: int

    def stays(self, rank: int) -> bool:
        """Tell whether a rank that holds a part before and after holds the same one."""
        if not (self.source.holds(rank) and self.target.holds(rank)):
            return False
        if self.source == self.target:
            return True
        region = self.source.region(rank, self.shape)
        return region.summand is None and region == self.target.region(rank, self.shape)

    @property
    def least_bytes(self) -> int:
        """Count the bytes that any plan of it must send; symbolic dims count as one entry."""
        if self.source == self.target:
            return 0
        return least_entries(Transition(self.source, self.target, self.shape)) * self.itemsize


@dataclass(frozen=True, slots=True)
class SliceTransfer:
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
    order, make up its one message. `relay` is the second round: it fills the results of the first in place.
    """

    moves: tuple[TensorMove, ...]
    transfers: tuple[SliceTransfer, ...]
    relay: BsrPlan | None = None
    outgoing: Mapping[int, Mapping[int, Sequence[SliceTransfer]]] = field(init=False, repr=False, compare=False)
    incoming: Mapping[int, Sequence[SliceTransfer]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        outgoing: dict[int, dict[int, list[SliceTransfer]]] = {}
        incoming: dict[int, list[SliceTransfer]] = {}
        for transfer in self.transfers:
            incoming.setdefault(transfer.receiver, []).append(transfer)
            if transfer.sender != transfer.receiver:
                peers = outgoing.setdefault(transfer.sender, {})
                peers.setdefault(transfer.receiver, []).append(transfer)
        object.__setattr__(self, "outgoing", outgoing)
        object.__setattr__(self, "incoming", incoming)

    @property
    def rounds(self) -> tuple[BsrPlan, ...]:
        """The rounds, one after the other."""
        return (self,) if self.relay is None else (self, self.relay)

    @property
    def messages(self) -> list[tuple[int, int, int]]:
        """List (sender, receiver, bytes) of this round; symbolic dims count as one entry."""
        return [
            (sender, receiver, sum(t.numel * self.moves[t.move].itemsize for t in transfers))
            for sender, peers in sorted(self.outgoing.items())
            for receiver, transfers in sorted(peers.items())
        ]


NodeOf = Callable[[int], int]
_Heap = list[tuple[int, int, int]]  # load when last seen, place among the owners, rank


class OwnerSet:
    """The ranks that hold one summand of a slice, ready to be asked for the least loaded."""

    def __init__(self, ranks: Sequence[int], node_of: NodeOf) -> None:
        self.ranks, self.members = tuple(ranks), frozenset(ranks)
        self.far: _Heap = [(0, place, rank) for place, rank in enumerate(ranks)]
        self.near: dict[int, _Heap] = {}
        for place, rank in enumerate(ranks):
            self.near.setdefault(node_of(rank), []).append((0, place, rank))


class Senders:
    """Chooses senders by load, and counts the bytes that every rank has sent, within its node and to others.

    Every choice takes amortised logarithmic time: loads only grow, so the heaps are put right when looked at.
    """

    def __init__(self, node_of: NodeOf) -> None:
        self.node_of = node_of
        self.within: defaultdict[int, int] = defaultdict(int)
        self.between: defaultdict[int, int] = defaultdict(int)
        self._sets: dict[tuple[int, ...], OwnerSet] = {}

    def owners(self, ranks: tuple[int, ...]) -> OwnerSet:
        """Return the owner set of `ranks`; slices with the same owners share it."""
        if ranks not in self._sets:
            self._sets[ranks] = OwnerSet(ranks, self.node_of)
        return self._sets[ranks]

    def sender(self, owners: OwnerSet, receiver: int) -> int:
        """Choose the owner that sends to `receiver`."""
        return receiver if receiver in owners.members else self.choose(owners, receiver)

    def price(self, sender: int, receiver: int) -> tuple[int, int]:
        """Compare transfers: local, then inside a node, then between nodes; then by load."""
        if sender == receiver:
            return 0, 0
        return (1, self.within[sender]) if self._same_node(sender, receiver) else (2, self.between[sender])

    def add(self, sender: int, receiver: int, num_bytes: int) -> None:
        """Count a transfer."""
        if sender != receiver:
            counter = self.within if self._same_node(sender, receiver) else self.between
            counter[sender] += num_bytes

    def choose(self, owners: OwnerSet, receiver: int) -> int:
        """Choose among owners other than the receiver."""
        near = owners.near.get(self.node_of(receiver))
        return _least(near, self.within) if near else _least(owners.far, self.between)

    def _same_node(self, a: int, b: int) -> bool:
        return self.node_of(a) == self.node_of(b)


def _least(heap: _Heap, loads: Mapping[int, int]) -> int:
    """Return the least loaded rank, of equals the first; the top is right once its load is what was last seen."""
    while True:
        load, place, rank = heap[0]
        if loads[rank] == load:
            return rank
        heapq.heapreplace(heap, (loads[rank], place, rank))


def plan_moves(
    moves: Sequence[TensorMove],
    *,
    node_of: NodeOf = lambda rank: 0,
    relays: bool = False,
    afar: bool = True,
    senders: Callable[[NodeOf], Senders] = Senders,
) -> BsrPlan:
    """Plan moves together, so that their messages are fused and their load is shared; linear in the table.

    `node_of` gives the node of a rank, `senders` chooses who sends; without `afar` only sums are relayed.
    Raises ResolveError where an annotation does not fit its shape.
    """
    loads = senders(node_of)
    transfers: list[SliceTransfer] = []
    passed_on: list[SliceTransfer] = []
    for number, move in enumerate(moves):
        for part in _slices(move):
            copies = [[loads.owners(ranks) for ranks in copy] for copy in part.owners]
            teams = _relay_teams(part, node_of, afar=afar) if relays and not move.target.has_partial else []
            for team in teams:
                for dims, first in zip(cut_evenly(part.dims, len(team)), team, strict=False):
                    chunk = replace(part, dims=dims)
                    transfers += _transfers(number, move, chunk, copies, first, loads)
                    passed_on += _pass_on(number, move, chunk, first, team, loads)
            relayed = {rank for team in teams for rank in team}
            for receiver in part.receivers:
                if receiver not in relayed:
                    transfers += _transfers(number, move, part, copies, receiver, loads)
    in_place = tuple(replace(move, source=move.target) for move in moves)
    return BsrPlan(tuple(moves), tuple(transfers), BsrPlan(in_place, tuple(passed_on)) if passed_on else None)


def _relay_teams(part: Slice, node_of: NodeOf, *, afar: bool = True) -> list[tuple[int, ...]]:
    """List the receivers of a slice that had better share what they get, team by team."""
    summands, receivers = min(map(len, part.owners)), len(part.receivers)
    if summands > 1:
        # Per receiver: all other summands whole, against a share of them and the shares of the others.
        saves = (summands - 1) * receivers > summands - 1 + receivers - 1
        return [part.receivers] if saves and receivers > 1 else []
    if not afar:
        return []
    near = {node_of(owner) for copy in part.owners for ranks in copy for owner in ranks}
    teams: dict[int, list[int]] = {}
    for receiver in part.receivers:
        if node_of(receiver) not in near:
            teams.setdefault(node_of(receiver), []).append(receiver)
    return [tuple(team) for team in teams.values() if len(team) > 1]


def cut_evenly(dims: Dims, count: int) -> list[Dims]:
    """Cut a part of index space in at most `count` chunks of about equal size, along its longest dim."""
    if not dims:
        return [dims]
    dim = max(range(len(dims)), key=lambda d: length(dims[d]))
    size = length(dims[dim])
    bounds = [size * index // count for index in range(count + 1)]
    return [
        (*dims[:dim], merge(select(dims[dim], a, b)), *dims[dim + 1 :]) for a, b in itertools.pairwise(bounds) if a < b
    ]


def _pass_on(
    number: int, move: TensorMove, chunk: Slice, first: int, team: Sequence[int], loads: Senders
) -> list[SliceTransfer]:
    others = [rank for rank in team if rank != first]
    for rank in others:
        loads.add(first, rank, chunk.numel * move.itemsize)
    return [SliceTransfer(number, chunk.dims, chunk.numel, first, rank, adds=False) for rank in others]


def _slices(move: TensorMove) -> tuple[Slice, ...]:
    if move.source == move.target:
        return ()
    transition = Transition(move.source, move.target, move.shape)
    try:
        return finest_slices(transition)
    except AnnotationError as error:
        raise ResolveError(f"cannot move {transition}: {error}") from error


def _transfers(
    number: int, move: TensorMove, part: Slice, copies: Sequence[Sequence[OwnerSet]], receiver: int, loads: Senders
) -> list[SliceTransfer]:
    choices = [[loads.sender(owners, receiver) for owners in copy] for copy in copies]
    if len(choices) > 1:
        choices.sort(key=lambda senders: sorted((loads.price(s, receiver) for s in senders), reverse=True))
    senders = choices[0]
    for sender in senders:
        loads.add(sender, receiver, part.numel * move.itemsize)
    return [
        SliceTransfer(number, part.dims, part.numel, sender, receiver, adds=index > 0)
        for index, sender in enumerate(senders)
    ]


def plan_on_links(moves: Sequence[TensorMove], topology: Topology | None) -> BsrPlan:
    """Plan moves whose receivers share what they all get from another node, where that is cheaper.

    Without a topology nothing is shared.
    """
    if topology is None:
        return plan_moves(moves)
    plans = [plan_moves(moves, node_of=topology.node_of, relays=relays) for relays in (False, True)]
    return min(plans, key=lambda plan: price_plan(plan, topology))


def price_plan(plan: BsrPlan, topology: Topology) -> float:
    """Price a plan: its rounds one after the other."""
    return rounds_cost([part.messages for part in plan.rounds], topology)
