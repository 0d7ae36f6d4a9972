"""What blocks hold that are computed again in backward, cut where the pass that recomputes cuts them.

What a group has sent is kept, so that what stands between two messages is a piece: backward computes it again by
itself, and its values are free before those of an earlier piece come back. What is sent depends on how a group shares
work, and so do the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.planner.count.peaks import EVERYWHERE, Held, Owner, Place, PlaceOf, Run, Sharing
from hetu_fx.transforms.layouts.work_shares import WorkShares
from hetu_fx.transforms.lowering.recompute import segments_of


class SegmentPeaks(NamedTuple):
    """What a piece keeps, what besides since it is sent, and the most above what earlier ones keep."""

    kept: Held
    sent: Held
    forward: Held
    backward: Held
    later: Held


@dataclass(frozen=True, slots=True)
class RecomputeSegments:
    """The pieces of all parts for one way to share work; ops go by their names.

    `sent` are the ops whose results are sent, with how the group shares what arrives; `readers` the ops that read each
    one's result.
    """

    places: Mapping[str, Place]
    sent: Mapping[str, Sharing]
    readers: Mapping[str, tuple[str, ...]]

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
        kept, made, left, sent = run.kept(self.place), run.made(), self._left(run), self._sent(run)
        first, later = (_Backward.of(run, self.place, added) for added in (frozenset[int](), run.gradients))
        before, after, none = kept.get((EVERYWHERE, 0), Held()), sum(made.values(), Held()), Held()
        found = []
        for part in range(num_parts):
            after -= made.get(part, none)
            pieces = []
            for place in ((part, piece) for piece in range(self._count(part))):
                own, forward = kept.get(place, none), later.most.get((place, False), before) - before
                backward = first.peak(place, before, own, after, forward), later.peak(place, before, own, none, forward)
                pieces.append(SegmentPeaks(left.get(place, none), sent.get(place, none), forward, *backward))
                before += own
            found.append(tuple(pieces))
        return tuple(found)

    def _count(self, part: int) -> int:
        return 1 + max((piece for other, piece in self.places.values() if other == part), default=0)

    def _left(self, run: Run) -> dict[Place, Held]:
        """Return what is left of each place's storages after the forward, without what is sent."""
        ops = self.crossing(run.saving) - self.sent.keys()
        storages = set[int]().union(*(run.results[op].storages for op in ops if op in run.results))
        found: dict[Place, Held] = {}
        for change in run.changes:
            if change.bytes > 0 and change.storage in storages and not change.during.is_backward:
                place = self.place(change.owner)
                found[place] = found.get(place, Held()) + Held.by(change)
        return found

    def _sent(self, run: Run) -> dict[Place, Held]:
        found: dict[Place, Held] = {}
        for op in sorted(self.crossing(run.saving) & self.sent.keys() & run.results.keys()):
            place = self.places[op]
            found[place] = found.get(place, Held()) + Held.shared(run.results[op].bytes, self.sent[op])
        return found


@dataclass(frozen=True, slots=True)
class _Backward:
    """The most that is held in each place's turn, and what is held when the backward comes there."""

    most: Mapping[tuple[Place, bool], Held]
    entered: Mapping[Place, Held]

    @classmethod
    def of(cls, run: Run, place_of: PlaceOf, added: frozenset[int]) -> _Backward:
        """Read a run, with storages in `added` held for a moment only."""
        return cls(run.most(place_of, added), run.entered(place_of, added))

    def peak(self, place: Place, before: Held, own: Held, after: Held, forward: Held) -> Held:
        """Return the most that a piece holds above what is kept before it, and gradients made after its part.

        `own` is what it keeps where all is kept, `forward` the most in its forward.
        """
        if place not in self.entered:
            return Held()
        again = self.entered[place] - before - own - after + forward
        return max(self.most[place, True] - before - after, again, key=lambda held: held.whole)


def all_pieces(graph: Graph, shares: WorkShares, part_of: Mapping[fx.Node, int]) -> dict[str, RecomputeSegments]:
    """Return the pieces by how the devices of a stage share work, under the names of `footprint.Again`."""
    ops = [node for node in graph.graph.nodes if node.op == "call_function" and part_of[node] >= 0]
    weights = frozenset(leaf.node for leaf in graph.leaves_of(LeafKind.PARAMETER))
    spans: dict[int, list[fx.Node]] = {}
    for node in ops:
        spans.setdefault(part_of[node], []).append(node)
    readers = {node.name: tuple(user.name for user in node.users) for node in ops}
    pieces = {}
    for way, sent in _sent(ops, shares).items():
        numbers = {part: segments_of(span, frozenset(sent), weights) for part, span in spans.items()}
        places = {node.name: (part, segment) for part, found in numbers.items() for node, segment in found.items()}
        pieces[way] = RecomputeSegments(places, {node.name: sharing for node, sharing in sent.items()}, readers)
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
