"""What each part of a program keeps, and the most that is held while it runs, from what came and went in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from hetu_fx.planner.count.storages import Change

EVERYWHERE = -1
"""The part of values that every stage computes for itself."""


class Sharing(IntEnum):
    """Whether a tensor parallel group holds a storage in shares: never, if it shares the sequence too, or always."""

    NEVER = 0
    IN_SEQUENCE = 1
    ALWAYS = 2


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
    """Bytes, how many of them a tensor parallel group holds in shares, and how many besides in those of a sequence."""

    whole: int = 0
    split: int = 0
    sequence: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(self.whole + other.whole, self.split + other.split, self.sequence + other.sequence)

    def __sub__(self, other: Held) -> Held:
        return Held(self.whole - other.whole, self.split - other.split, self.sequence - other.sequence)

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
            case Sharing.NEVER:
                return cls(size)


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
class Result:
    """The storages that an op's result has, and its own bytes of them."""

    storages: frozenset[int]
    bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """What came and went in a run forward and backward; `gradients` are the storages of parameters' gradients.

    `results` are those of ops by name, `saving` the ops that save anything for backward.
    """

    changes: Sequence[Change[Owner]]
    gradients: frozenset[int]
    results: Mapping[str, Result] = field(default_factory=dict)
    saving: frozenset[str] = frozenset()

    def peaks(self, num_parts: int) -> tuple[tuple[PartPeaks, ...], Held]:
        """Return the peaks of each part, and what is kept everywhere."""
        kept, made = self.kept(_whole), self.made()
        first, later = self.most(_whole), self.most(_whole, self.gradients)
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

    def made(self) -> dict[int, Held]:
        """Return the gradients of parameters that each part's backward makes."""
        made: dict[int, Held] = {}
        for ((part, _), _), change in _turns(self.changes, _whole):
            if change.storage in self.gradients:
                made[part] = made.get(part, Held()) + Held.by(change)
        return made

    def kept(self, place_of: PlaceOf) -> dict[Place, Held]:
        """Return what the ops of each place have allocated in the forward and is there when the backward begins."""
        kept: dict[Place, Held] = {}
        for change in self.changes:
            if change.during.is_backward:
                break
            if change.storage not in self.gradients:
                place = place_of(change.owner)
                kept[place] = kept.get(place, Held()) + Held.by(change)
        return kept

    def most(self, place_of: PlaceOf, added: frozenset[int] = frozenset()) -> dict[tuple[Place, bool], Held]:
        """Return the most that is held at once in each place's turn, forward and backward.

        A place's turn lasts until a later one's begins, backward until an earlier one's: what an op of an earlier
        place does in between is held in the later one's turn. Storages in `added` are held for a moment only, as
        gradients are that are added to those of earlier micro-batches.
        """
        held, most = Held(), dict[tuple[Place, bool], Held]()
        for turn, change in _turns(self.changes, place_of):
            now = held + Held.by(change)
            if change.storage not in added:
                held = now
            if turn not in most or now.whole > most[turn].whole:
                most[turn] = now
        return most

    def entered(self, place_of: PlaceOf, added: frozenset[int] = frozenset()) -> dict[Place, Held]:
        """Return what is held when the backward comes to each place, without storages in `added`."""
        held, found = Held(), dict[Place, Held]()
        for (place, is_backward), change in _turns(self.changes, place_of):
            if is_backward:
                found.setdefault(place, held)
            if change.storage not in added:
                held += Held.by(change)
        return found


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
