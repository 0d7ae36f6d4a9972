"""How a device graph knows its device's part of a split dim: as numbers, or computed from a length as it runs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from hetu_fx.transforms.specialize.localize import Size, computed


@dataclass(frozen=True, slots=True)
class Parts:
    """A split dim: its length, and where each device's part starts and how long it is."""

    length: Size
    starts: tuple[Size, ...]
    sizes: tuple[Size, ...]

    @classmethod
    def of_sizes(cls, sizes: tuple[int, ...]) -> Parts:
        """Return parts that are known."""
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return cls(sum(sizes), tuple(starts), sizes)

    @classmethod
    def in_shares(cls, length: fx.Node, shares: Sequence[int]) -> Parts:
        """Emit the parts of a length, as `proportional_sizes` cuts it."""
        whole = sum(shares)
        cuts = itertools.accumulate(shares[:-1])
        inner = [computed(operator.floordiv, computed(operator.mul, length, share), whole) for share in cuts]
        sizes = [computed(operator.sub, stop, start) for start, stop in itertools.pairwise((*inner, length))]
        return cls(length, (0, *inner), (inner[0], *sizes))
