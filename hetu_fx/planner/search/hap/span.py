"""Seconds of a stretch of a program that can be joined with what stands before and after it.

Work between two exchanges of activations is waited for at their end: seconds are the largest sum over that
stage. A stretch whose ends are open is

    work before its first exchange, per device     a = (a_i)
    everything up to its last exchange             m
    work after that, per device                    z = (z_i)

and without an exchange just a. Joined: (a, m, z) (a', m', z') = (a, m + max(z + a') + m', z'). Stretches add up in
time as they are joined, so N equal ones need be searched once (min-plus).
"""

from __future__ import annotations

from typing import NamedTuple

Vector = tuple[float, ...]


class Span(NamedTuple):
    """(a, m, z); `middle` is None, and `tail` empty, where nothing is waited for."""

    head: Vector
    middle: float | None = None
    tail: Vector = ()

    @property
    def seconds(self) -> float:
        """Return the seconds of the stretch alone."""
        return max(self.head) + (0.0 if self.middle is None else self.middle + max(self.tail))

    def then(self, other: Span) -> Span:
        """Return the stretch and another one after it."""
        if self.middle is None:
            return Span(_add(self.head, other.head), other.middle, other.tail)
        joined = _add(self.tail, other.head)
        if other.middle is None:
            return Span(self.head, self.middle, joined)
        return Span(self.head, self.middle + max(joined) + other.middle, other.tail)

    def least_seconds(self, to_come: Vector) -> float:
        """Return what no continuation goes below in which the devices have so much work to come."""
        if self.middle is None:
            return max(_add(self.head, to_come))
        return max(self.head) + self.middle + max(_add(self.tail, to_come))

    def is_never_later(self, other: Span, extra: float = 0.0) -> bool:
        """Tell whether it takes no longer than another, whatever stands before and after, even with `extra`.

        `extra` is seconds of exchanges at its end, that the other one does not need. With one device that can
        be the slowest that is exact; else it may say no where yes is true, when there is an extra.
        """
        if len(self.head) == 1:
            return self.seconds + extra <= other.seconds * _SLIGHTLY_MORE
        if extra > 0:
            return self._with_exchange(extra).is_never_later(other)
        if self.middle is None:
            ends = other.head if other.middle is None else _add(other.head, other.tail)
            return _lead(self.head, ends) <= (other.middle or 0.0)
        if other.middle is None:
            return False
        late = _lead(self.head, other.head) + _lead(self.tail, other.tail)
        return late + self.middle <= other.middle * _SLIGHTLY_MORE

    def _with_exchange(self, seconds: float) -> Span:
        nothing = (0.0,) * len(self.head)
        return self.then(Span(nothing, seconds, nothing))


_SLIGHTLY_MORE = 1 + 1e-12


def _lead(one: Vector, other: Vector) -> float:
    return max(a - b for a, b in zip(one, other, strict=True))


def _add(one: Vector, other: Vector) -> Vector:
    return tuple(map(float.__add__, one, other))
