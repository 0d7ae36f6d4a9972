"""Pictures of what a run did step by step, for any number of steps: neighbours share a place where there are many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import TypeVar

from hetu_fx.show.markup import COLOURS

T = TypeVar("T")

PLACES = 400
"""So many places a picture has at most."""

WIDTH, HEIGHT, LANE = 1000.0, 200.0, 20.0


def assign_colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name, in the order in which they first ran; the seventh has that of the first."""
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(dict.fromkeys(names))}


def places(items: Sequence[T], most: int = PLACES) -> list[Sequence[T]]:
    """Return the items in order as `most` runs of neighbours of nearly one length, each its own where there is room."""
    count = min(most, len(items))
    ends = [len(items) * number // count for number in range(count + 1)] if count else [0]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Scale:
    """From what a value is to how high it stands in a picture; beyond is cut off."""

    low: float
    high: float

    def y(self, value: float) -> float:
        """Return the distance from the top."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return HEIGHT * (1.0 - min(1.0, max(0.0, share)))


def boxes(values: Sequence[tuple[float, str, str]], scale: Scale) -> str:
    """Return boxes of (value, colour, what is said of it) side by side."""
    wide = WIDTH / max(1, len(values))
    return "".join(
        f'<rect x="{index * wide:.2f}" y="{scale.y(value):.2f}" width="{wide * 0.9:.2f}" '
        f'height="{HEIGHT - scale.y(value):.2f}" fill="{colour}"><title>{escape(told)}</title></rect>'
        for index, (value, colour, told) in enumerate(values)
    )


def levels(values: Sequence[float | None], scale: Scale) -> str:
    """Return a line across the place of each value that is known and in the picture."""
    wide = WIDTH / max(1, len(values))
    return "".join(
        f'<line x1="{index * wide:.2f}" x2="{(index + 1) * wide:.2f}" y1="{scale.y(value):.2f}" '
        f'y2="{scale.y(value):.2f}" stroke="currentColor" stroke-width="2"/>'
        for index, value in enumerate(values)
        if value is not None and value <= scale.high
    )


def curve(groups: Sequence[Sequence[float]], scale: Scale, colour: str) -> str:
    """Return a line through the medians of groups of numbers, in a band from the least to the most of each."""
    wide = WIDTH / max(1, len(groups))
    at = [(index + 0.5) * wide for index in range(len(groups))]
    if len(groups) == 1:
        return f'<circle cx="{at[0]:.2f}" cy="{scale.y(median(groups[0])):.2f}" r="4" fill="{colour}"/>'
    middle = _points(at, list(map(median, groups)), scale)
    upper, lower = _points(at, list(map(max, groups)), scale), _points(at, list(map(min, groups)), scale)
    band = " ".join([*upper, *reversed(lower)])
    return (
        f'<polygon points="{band}" fill="{colour}" opacity="0.25"/>'
        f'<polyline points="{" ".join(middle)}" fill="none" stroke="{colour}" stroke-width="2"/>'
    )


def _points(at: Sequence[float], values: Sequence[float], scale: Scale) -> list[str]:
    return [f"{x:.2f},{scale.y(value):.2f}" for x, value in zip(at, values, strict=True)]


def plot(picture: str, top: str, first: str, last: str, bottom: str = "") -> str:
    """Return a picture with what stands at its top, at its foot, and at the ends of its steps."""
    head = f'<div class="axis"><span>{escape(top)}</span></div>'
    svg = f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img">{picture}</svg>'
    feet = "".join(f"<span>{escape(text)}</span>" for text in (first, bottom, last))
    return f'<div class="plot">{head}{svg}<div class="axis">{feet}</div></div>'


def lane(label: str, picture: str, kind: str = "") -> str:
    """Return one of several rows on one scale: a picture of `WIDTH` by `LANE` with what it is of at its left."""
    svg = f'<svg viewBox="0 0 {WIDTH:.0f} {LANE:.0f}" preserveAspectRatio="none" role="img">{picture}</svg>'
    return f'<div class="lane{kind}"><span>{escape(label)}</span>{svg}</div>'


def finite(items: Sequence[T], value: Callable[[T], float | None]) -> list[T]:
    """Return the items whose value is a number that a picture can show."""
    found = ((item, value(item)) for item in items)
    return [item for item, number in found if number is not None and math.isfinite(number)]


def shares(counts: Mapping[str, int]) -> str:
    """Say how many there are of each name, for the title of a place."""
    return ", ".join(name if len(counts) == 1 else f"{name} {count} times" for name, count in counts.items())
