"""How a tensor lies on the devices, and what it takes to have it lie otherwise, forward and backward.

HAP's states are Identity, Gather(dim) and Reduce. Here a copy also says what its gradient is: the devices'
gradients of a COPY are copies, those of a SHARED tensor are partial, because each device used its copy for a
part of the work (an operand that lacks the factor on which its op is cut). The released HAP takes all copies
for SHARED; telling them apart finds Megatron's pair of all-reduces, one forward and one backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class LayoutKind(StrEnum):
    """What each device has of a tensor, and of its gradient."""

    COPY = "copy"  # all, and all of the gradient
    SHARED = "shared"  # all, and a partial gradient
    SPLIT = "split"  # its part, and its part of the gradient
    PARTIAL = "partial"  # partial, and all of the gradient


class Layout(NamedTuple):
    """A layout; `dim` and `segment`, whose ratios the parts follow, are those of a split."""

    kind: LayoutKind
    dim: int = -1
    segment: int = 0

    def __str__(self) -> str:
        return f"split {self.dim}" if self.kind is LayoutKind.SPLIT else str(self.kind)


COPY = Layout(LayoutKind.COPY)
SHARED = Layout(LayoutKind.SHARED)
PARTIAL = Layout(LayoutKind.PARTIAL)


def split(dim: int, segment: int = 0) -> Layout:
    """Return the layout of parts of a dim."""
    return Layout(LayoutKind.SPLIT, dim, segment)


class ChangeKind(StrEnum):
    """What moves data when a layout changes."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    SHIFT = "shift"  # parts of one dim to parts of it by other ratios


Both = tuple[ChangeKind | None, ChangeKind | None]
"""What changes the tensor forward, and its gradient backward; None where nothing moves."""

_CHANGES: dict[tuple[str, str], Both] = {
    ("copy", "shared"): (None, ChangeKind.ALL_REDUCE),
    ("shared", "copy"): (None, None),
    ("copy", "split"): (None, ChangeKind.ALL_GATHER),
    ("shared", "split"): (None, None),
    ("split", "copy"): (ChangeKind.ALL_GATHER, None),
    ("split", "shared"): (ChangeKind.ALL_GATHER, ChangeKind.REDUCE_SCATTER),
    ("partial", "copy"): (ChangeKind.ALL_REDUCE, None),
    ("partial", "shared"): (ChangeKind.ALL_REDUCE, ChangeKind.ALL_REDUCE),
    ("partial", "split"): (ChangeKind.REDUCE_SCATTER, ChangeKind.ALL_GATHER),
}


def changes(source: Layout, target: Layout) -> Iterator[tuple[Layout, Both]]:
    """Yield (layout that the parts follow, changes) that make `target` of `source`; nothing if it cannot be.

    Between splits of different dims under different ratios that is two changes.
    """
    if source == target:
        return
    if not source.kind == target.kind == LayoutKind.SPLIT:
        found = _CHANGES.get((source.kind, target.kind))
        if found is not None:
            yield (source if source.kind is LayoutKind.SPLIT else target), found
        return
    if source.dim != target.dim:
        yield source, (ChangeKind.ALL_TO_ALL, ChangeKind.ALL_TO_ALL)
    if source.segment != target.segment:
        yield target._replace(segment=source.segment), (ChangeKind.SHIFT, ChangeKind.SHIFT)
