"""What grows in proportion to something besides a part that does not: seconds by rows or bytes, bytes by rows."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """The line `fixed + slope * x`."""

    fixed: float = 0.0
    slope: float = 0.0

    def __call__(self, x: float) -> float:
        return self.fixed + self.slope * x

    def __add__(self, other: Line) -> Line:  # type: ignore[override]
        return Line(self.fixed + other.fixed, self.slope + other.slope)

    def upper(self, other: Line) -> Line:
        """Return a line that is nowhere below either where x is 0 or more."""
        return Line(max(self.fixed, other.fixed), max(self.slope, other.slope))


ZERO = Line()
