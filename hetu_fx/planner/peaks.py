"""What each part of a program keeps, and the most that is held while it runs, from what came and went in one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from hetu_fx.planner.storages import Change

EVERYWHERE = -1
"""The part of values that every stage computes for itself."""


class Sharing(IntEnum):
    """Whether a tensor parallel group holds a storage in shares: never, if it shares the sequence too, or always."""

    NEVER = 0
    IN_SEQUENCE = 1
    ALWAYS = 2


@dataclass(frozen=True, slots=True)
class Owner:
    """Who allocates: a part, forward or backward.

    `sizes` tells for some sizes in bytes how a group shares such a storage; `sharing` for all others.
    """

    part: int
    is_backward: bool = False
    sharing: Sharing = Sharing.NEVER
    sizes: Mapping[int, Sharing] = field(default_factory=dict)


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
        match change.owner.sizes.get(abs(change.bytes), change.owner.sharing):
            case Sharing.ALWAYS:
                return cls(change.bytes, change.bytes)
            case Sharing.IN_SEQUENCE:
                return cls(change.bytes, 0, change.bytes)
            case Sharing.NEVER:
                return cls(change.bytes)


class PartPeaks(NamedTuple):
    """What a part keeps, and the most in its forward, in a first backward and in a later one (`planner.footprint`)."""

    kept: Held
    forward: Held
    backward: Held
    later: Held


@dataclass(frozen=True, slots=True)
class Run:
    """What came and went in a run forward and backward; `gradients` are the storages of parameters' gradients."""

    changes: Sequence[Change[Owner]]
    gradients: frozenset[int]

    def peaks(self, num_parts: int) -> tuple[tuple[PartPeaks, ...], Held]:
        """Return the peaks of each part, and what is kept everywhere."""
        passing = [change for change in self.changes if change.storage not in self.gradients]
        kept, made = _kept(passing), _made(self.changes, self.gradients)
        first, later = _most(self.changes, frozenset()), _most(self.changes, self.gradients)
        everywhere = kept.get(EVERYWHERE, Held())
        after = sum(made.values(), Held())
        parts, before = [], everywhere
        for part in range(num_parts):
            own = kept.get(part, Held())
            after -= made.get(part, Held())
            # A part whose turn never comes holds nothing more.
            backward = first.get((part, True), before + own + after) - before - own - after
            again = later.get((part, True), before + own) - before - own
            parts.append(PartPeaks(own, later.get((part, False), before) - before, backward, again))
            before += own
        return tuple(parts), everywhere


def _made(changes: Iterable[Change[Owner]], gradients: frozenset[int]) -> dict[int, Held]:
    """Return the gradients of parameters that each part's backward makes."""
    made: dict[int, Held] = {}
    turn = (0, False)
    for change in changes:
        turn = _next(turn, change.during)
        if change.storage in gradients:
            made[turn[0]] = made.get(turn[0], Held()) + Held.by(change)
    return made


def _kept(changes: Iterable[Change[Owner]]) -> dict[int, Held]:
    """Return what each part's ops have allocated in the forward and is still there when the backward begins."""
    kept: dict[int, Held] = {}
    for change in changes:
        if change.during.is_backward:
            break
        part = change.owner.part
        kept[part] = kept.get(part, Held()) + Held.by(change)
    return kept


def _most(changes: Iterable[Change[Owner]], added: frozenset[int]) -> dict[tuple[int, bool], Held]:
    """Return the most that is held at once in each part's turn, forward and backward.

    A part's turn lasts until a later one's begins, backward until an earlier one's: what an op of an earlier part
    does in between is held in the later one's turn. Storages in `added` are held for a moment only, as gradients are
    that are added to those of earlier micro-batches.
    """
    held, most, turn = Held(), dict[tuple[int, bool], Held](), (0, False)
    for change in changes:
        turn = _next(turn, change.during)
        now = held + Held.by(change)
        if change.storage not in added:
            held = now
        if turn not in most or now.whole > most[turn].whole:
            most[turn] = now
    return most


def _next(turn: tuple[int, bool], during: Owner) -> tuple[int, bool]:
    part, is_backward = turn
    if during.part == EVERYWHERE:
        return turn
    if during.is_backward:
        return (min(part, during.part) if is_backward else during.part), True
    return turn if is_backward else (max(part, during.part), False)
