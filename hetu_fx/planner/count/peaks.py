"""What each part of a program keeps, and the most that is held while it runs, from what came and went in one run.

Blocks that are computed again in backward are cut where the pass that recomputes cuts them. What a group has sent is
kept, so that what stands between two messages is a piece: backward computes it again by itself, and its values are free
before those of an earlier piece come back. What is sent depends on how a group shares work, and so do the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from itertools import takewhile
from operator import add, attrgetter, sub
from typing import NamedTuple, TypeVar

from torch import fx

from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.planner.count.product_ops import multiplies, multiplies_weights
from hetu_fx.planner.count.storages import Change
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.work_shares import WorkShares
from hetu_fx.transforms.lowering.recompute import number_segments

K = TypeVar("K")

EVERYWHERE = -1
"""The part of values that every stage computes for itself."""


class Sharing(IntEnum):
    """Whether a tensor parallel group holds a storage in shares: never, if it shares the sequence too, or always.

    REPEATED: in parts that several devices hold each (`WorkShares.repeats`).
    """

    NEVER = 0
    IN_SEQUENCE = 1
    REPEATED = 2
    ALWAYS = 3


@dataclass(frozen=True, slots=True)
class Owner:
    """Who allocates: an op of a part, forward or backward.

    `sizes` tells for some sizes in bytes how a group shares such a storage; `sharing` for all others.
    """

    part: int
    is_backward: bool = False
    sharing: Sharing = Sharing.NEVER
    sizes: Mapping[int, Sharing] = field(default_factory=dict)
    op: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes, and how many of them a tensor parallel group holds in shares, or would in those of a sequence.

    `repeated` are those that it holds in parts which several devices have.
    """

    whole: int = 0
    split: int = 0
    sequence: int = 0
    repeated: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(*map(add, _SIZES(self), _SIZES(other)))

    def __sub__(self, other: Held) -> Held:
        return Held(*map(sub, _SIZES(self), _SIZES(other)))

    @classmethod
    def by(cls, change: Change[Owner]) -> Held:
        """Return what a change adds."""
        return cls.shared(change.bytes, change.owner.sizes.get(abs(change.bytes), change.owner.sharing))

    @classmethod
    def shared(cls, size: int, sharing: Sharing) -> Held:
        """Return so many bytes that a group shares so."""
        match sharing:
            case Sharing.ALWAYS:
                return cls(size, size)
            case Sharing.IN_SEQUENCE:
                return cls(size, 0, size)
            case Sharing.REPEATED:
                return cls(size, repeated=size)
            case Sharing.NEVER:
                return cls(size)


_SIZES = attrgetter(*(one.name for one in fields(Held)))


def _sums(pairs: Iterable[tuple[K, Held]]) -> dict[K, Held]:
    """Return the sum of what is held under each key."""
    sums: dict[K, Held] = {}
    for key, held in pairs:
        sums[key] = sums.get(key, Held()) + held
    return sums


class PartPeaks(NamedTuple):
    """What a part keeps, and the most in its forward, in a first backward and in a later one (`values.footprint`)."""

    kept: Held
    forward: Held
    backward: Held
    later: Held


Place = tuple[int, int]
"""A part of the program, and a piece of it, by number."""

PlaceOf = Callable[[Owner], Place]


@dataclass(frozen=True, slots=True)
class OpStorages:
    """The storages that an op's result has, and its own bytes of them."""

    storages: frozenset[int]
    bytes: int


@dataclass(frozen=True, slots=True)
class _Turns:
    """The most that is held in each place's turn, forward and backward, and what is held as backward comes there."""

    most: Mapping[tuple[Place, bool], Held]
    entered: Mapping[Place, Held]

    def peak(self, place: Place, before: Held, own: Held, after: Held, forward: Held) -> Held:
        """Return the most that a piece holds above what is kept before it, and gradients made after its part.

        `own` is what it keeps where all is kept, `forward` the most in its forward.
        """
        if place not in self.entered:
            return Held()
        again = self.entered[place] - before - own - after + forward
        return max(self.most[place, True] - before - after, again, key=lambda held: held.whole)


@dataclass(frozen=True, slots=True)
class Run:
    """What came and went in a run forward and backward; `gradients` are the storages of parameters' gradients.

    `results` are those of ops by name, `saving` the ops that save anything for backward.
    """

    changes: Sequence[Change[Owner]]
    gradients: frozenset[int]
    results: Mapping[str, OpStorages] = field(default_factory=dict)
    saving: frozenset[str] = frozenset()

    def peaks(self, num_parts: int) -> tuple[tuple[PartPeaks, ...], Held]:
        """Return the peaks of each part, and what is kept everywhere."""
        kept, made = self.kept(_whole), self.made()
        first, later = self.turns(_whole).most, self.turns(_whole, self.gradients).most
        everywhere = kept.get((EVERYWHERE, 0), Held())
        after = sum(made.values(), Held())
        parts, before = [], everywhere
        for part in range(num_parts):
            place = part, 0
            own = kept.get(place, Held())
            after -= made.get(part, Held())
            # A part whose turn never comes holds nothing more.
            backward = first.get((place, True), before + own + after) - before - own - after
            again = later.get((place, True), before + own) - before - own
            parts.append(PartPeaks(own, later.get((place, False), before) - before, backward, again))
            before += own
        return tuple(parts), everywhere

    def storages(self, ops: Iterable[str]) -> frozenset[int]:
        """Return the storages of the results of ops."""
        return frozenset[int]().union(*(self.results[op].storages for op in ops if op in self.results))

    def made(self) -> dict[int, Held]:
        """Return the gradients of parameters that each part's backward makes."""
        turns = _turns(self.changes, _whole)
        return _sums((part, Held.by(change)) for ((part, _), _), change in turns if change.storage in self.gradients)

    def kept(self, place_of: PlaceOf) -> dict[Place, Held]:
        """Return what the ops of each place have allocated in the forward and is there when the backward begins."""
        ahead = takewhile(lambda change: not change.during.is_backward, self.changes)
        lasting = (change for change in ahead if change.storage not in self.gradients)
        return _sums((place_of(change.owner), Held.by(change)) for change in lasting)

    def turns(self, place_of: PlaceOf, added: frozenset[int] = frozenset()) -> _Turns:
        """Return what is held in each place's turns.

        A place's turn lasts until a later one's begins, backward until an earlier one's: what an op of an earlier
        place does in between is held in the later one's turn. Storages in `added` are held for a moment only, as
        gradients are that are added to those of earlier micro-batches.
        """
        held, most, entered = Held(), dict[tuple[Place, bool], Held](), dict[Place, Held]()
        for turn, change in _turns(self.changes, place_of):
            if turn[1]:
                entered.setdefault(turn[0], held)
            now = held + Held.by(change)
            if change.storage not in added:
                held = now
            if turn not in most or now.whole > most[turn].whole:
                most[turn] = now
        return _Turns(most, entered)


def _whole(owner: Owner) -> Place:
    return owner.part, 0


def _turns(changes: Iterable[Change[Owner]], place_of: PlaceOf) -> Iterator[tuple[tuple[Place, bool], Change[Owner]]]:
    """Yield each change with whose turn it is then: a place, forward or backward."""
    place, is_backward = (0, 0), False
    for change in changes:
        now, during = place_of(change.during), change.during
        if during.part == EVERYWHERE:
            pass  # takes no turn
        elif during.is_backward:
            place, is_backward = (min(place, now) if is_backward else now), True
        elif not is_backward:
            place = max(place, now)
        yield (place, is_backward), change


class SegmentPeaks(NamedTuple):
    """What a piece keeps, what besides since it is sent, and the most above what earlier ones keep.

    `weights` and `products` are what products with weights and others make, kept where they are not computed again.
    """

    kept: Held
    sent: Held
    forward: Held
    backward: Held
    later: Held
    weights: Held = Held()
    products: Held = Held()


@dataclass(frozen=True, slots=True)
class RecomputeSegments:
    """The pieces of all parts for one way to share work; ops go by their names.

    `sent` are the ops whose results are sent, with how the group shares what arrives; `readers` the ops that read each
    one's result; `weights` and `products` those that multiply activations with weights, and with each other.
    """

    places: Mapping[str, Place]
    sent: Mapping[str, Sharing]
    readers: Mapping[str, tuple[str, ...]]
    weights: frozenset[str] = frozenset()
    products: frozenset[str] = frozenset()

    def place(self, owner: Owner) -> Place:
        """Return where an op stands; what stands in no piece counts with the first one."""
        return self.places.get(owner.op, (owner.part, 0))

    def crossing(self, saving: Iterable[str]) -> frozenset[str]:
        """Return the ops whose results other pieces start from, if these keep anything; `saving` are ops that do."""
        keeping = {self.places[op] for op in saving if op in self.places}
        pairs = [(op, self.places[other]) for op in self.places for other in self.readers[op] if other in self.places]
        return frozenset(op for op, place in pairs if place != self.places[op] and place in keeping)

    def peaks(self, run: Run, num_parts: int) -> tuple[tuple[SegmentPeaks, ...], ...]:
        """Return the peaks of each part's pieces.

        A piece's backward begins with its forward once more, while cotangents wait. What it holds then is what it holds
        where all is kept, without what earlier pieces keep there.
        """
        kept, made, sent = run.kept(self.place), run.made(), self._sent(run)
        left = self._allocated(run.storages(self.crossing(run.saving) - self.sent.keys()), run)
        weights, products = self._made_by(self.weights, run), self._made_by(self.products, run)
        first, later = run.turns(self.place), run.turns(self.place, run.gradients)
        before, after, none = kept.get((EVERYWHERE, 0), Held()), sum(made.values(), Held()), Held()
        found = []
        for part in range(num_parts):
            after -= made.get(part, none)
            pieces = []
            for place in ((part, piece) for piece in range(self._count(part))):
                own, forward = kept.get(place, none), later.most.get((place, False), before) - before
                backward = first.peak(place, before, own, after, forward), later.peak(place, before, own, none, forward)
                made_there = weights.get(place, none), products.get(place, none)
                lasting = left.get(place, none), sent.get(place, none)
                pieces.append(SegmentPeaks(*lasting, forward, *backward, *made_there))
                before += own
            found.append(tuple(pieces))
        return tuple(found)

    def _count(self, part: int) -> int:
        return 1 + max((piece for other, piece in self.places.values() if other == part), default=0)

    def _allocated(self, storages: frozenset[int], run: Run) -> dict[Place, Held]:
        """Return what of some storages the forward of each place has made."""
        return _sums(
            (self.place(change.owner), Held.by(change))
            for change in run.changes
            if change.bytes > 0 and change.storage in storages and not change.during.is_backward
        )

    def _made_by(self, ops: frozenset[str], run: Run) -> dict[Place, Held]:
        """Return what such ops make in each place, their results whether backward needs them or not.

        What is left or sent anyway is left out.
        """
        results = run.storages(ops) - run.storages(self.crossing(run.saving) | self.sent.keys())
        ahead = takewhile(lambda change: not change.during.is_backward, run.changes)
        inside = [c for c in ahead if c.owner.op in ops and c.storage not in run.storages(ops)]
        return _sums([*self._allocated(results, run).items(), *((self.place(c.owner), Held.by(c)) for c in inside)])

    def _sent(self, run: Run) -> dict[Place, Held]:
        ops = sorted(self.crossing(run.saving) & self.sent.keys() & run.results.keys())
        return _sums((self.places[op], Held.shared(run.results[op].bytes, self.sent[op])) for op in ops)


def all_pieces(
    graph: Graph, shares: WorkShares, part_of: Mapping[fx.Node, int], flow: Flow
) -> dict[str, RecomputeSegments]:
    """Return the pieces by how the devices of a stage share work, under the names of `footprint.RecomputeMemory`."""
    factors = shares.factors
    ops = [node for node in graph.graph.nodes if node.op == "call_function" and part_of[node] >= 0]
    weights = frozenset(leaf.node for leaf in graph.leaves_of(LeafKind.PARAMETER))
    spans: dict[int, list[fx.Node]] = {}
    for node in ops:
        spans.setdefault(part_of[node], []).append(node)
    readers = {node.name: tuple(user.name for user in node.users) for node in ops}
    of_weights = frozenset(node.name for node in ops if multiplies_weights(node, factors, flow))
    others = frozenset(node.name for node in ops if multiplies(node, factors)) - of_weights
    pieces = {}
    for way, sent in _sent(ops, shares).items():
        numbers = {part: number_segments(span, frozenset(sent), weights) for part, span in spans.items()}
        places = {node.name: (part, segment) for part, found in numbers.items() for node, segment in found.items()}
        shared = {node.name: sharing for node, sharing in sent.items()}
        pieces[way] = RecomputeSegments(places, shared, readers, of_weights, others)
    return pieces


def _sent(ops: Sequence[fx.Node], shares: WorkShares) -> dict[str, dict[fx.Node, Sharing]]:
    """Return what is sent in each way to share work, and how what arrives is shared.

    A group that shares the sequence spreads sums over it, and gathers it where the work is split otherwise.
    """
    summed = [node for node in ops if shares.sums(node)]
    gathered = dict.fromkeys((source for node in ops for source in shares.gathered(node)), Sharing.NEVER)
    spread = dict.fromkeys(summed, Sharing.IN_SEQUENCE)
    whole = (node for node in ops if shares.shares_sequence(node) and any(map(shares.shares_work, node.users)))
    return {
        "alone": {},
        "tensor": dict.fromkeys(summed, Sharing.NEVER),
        "sequence": spread | dict.fromkeys(whole, Sharing.NEVER),
        "context": gathered,
        "grid": spread | gathered,
    }
