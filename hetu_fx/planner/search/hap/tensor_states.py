"""How a tensor lies on the devices, what it takes to have it lie otherwise, forward and backward, and its bytes.

HAP's states are Identity, Gather(dim) and Reduce. Here a copy also says what its gradient is: the devices'
gradients of a COPY are copies, those of a SHARED tensor are partial, because each device used its copy for a
part of the work (an operand that lacks the factor on which its op is cut). The released HAP takes all copies
for SHARED; telling them apart finds Megatron's pair of all-reduces, one forward and one backward.

A device holds C, the bytes of what every device has all of, and its share of S, those of what is split.
Ratios under which devices of M_i bytes hold that exist just when

    C <= min_i M_i   and   S + n C <= sum_i M_i                                                  (1)

A parameter of P bytes takes 4 P: itself, its gradient, and two moments of Adam. Copies of it share the
moments and a master copy by the ratios (zero 1) or not (zero 0), as `hetu_fx.planner.values.device_memory` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from hetu_fx.planner.values.device_memory import MOMENTS, fixed_bytes
from hetu_fx.planner.values.tensor_program import Tensor, TensorProgram


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

_HALVES = {
    LayoutKind.COPY: ("whole", "whole"),
    LayoutKind.SHARED: ("whole", "summands"),
    LayoutKind.SPLIT: ("parts", "parts"),
    LayoutKind.PARTIAL: ("summands", "whole"),
}
"""What each device has of a tensor, and of its gradient."""

_MOVES = {
    ("parts", "whole"): ChangeKind.ALL_GATHER,
    ("summands", "whole"): ChangeKind.ALL_REDUCE,
    ("summands", "parts"): ChangeKind.REDUCE_SCATTER,
}
"""What `comm_ops.resolve` makes of one into another, of a tensor or of its gradient; the others move nothing."""


def changes(source: Layout, target: Layout) -> Iterator[tuple[Layout, Both]]:
    """Yield (layout that the parts follow, changes) that make `target` of `source`; nothing if it cannot be.

    Between splits of different dims under different ratios that is two changes.
    """
    if source == target:
        return
    if not source.kind == target.kind == LayoutKind.SPLIT:
        if target.kind is not LayoutKind.PARTIAL:  # no summands are made of what is none
            (value, gradient), (wanted, back) = _HALVES[source.kind], _HALVES[target.kind]
            both = _MOVES.get((value, wanted)), _MOVES.get((back, gradient))
            yield (source if source.kind is LayoutKind.SPLIT else target), both
        return
    if source.dim != target.dim:
        yield source, (ChangeKind.ALL_TO_ALL, ChangeKind.ALL_TO_ALL)
    if source.segment != target.segment:
        yield target._replace(segment=source.segment), (ChangeKind.SHIFT, ChangeKind.SHIFT)


class HeldBytes(NamedTuple):
    """Bytes that every device holds, and bytes that devices share."""

    copied: float = 0.0
    spread: float = 0.0

    def __add__(self, other: object) -> HeldBytes:
        assert isinstance(other, HeldBytes)
        return HeldBytes(self.copied + other.copied, self.spread + other.spread)


def held_bytes(tensor: Tensor, layout: Layout, *, zero: int = 1) -> HeldBytes:
    """Return what a tensor takes in a layout: a parameter with all its states, a value if it is kept."""
    is_split = layout.kind is LayoutKind.SPLIT
    if tensor.kind == "parameter" and tensor.has_gradient:
        whole = sum(count for _, count in fixed_bytes(tensor.bytes, zero=0, num_replicas=1))
        if is_split:
            return HeldBytes(spread=whole)
        if not zero:
            return HeldBytes(copied=whole)
        return HeldBytes(2 * tensor.bytes, (1 + MOMENTS) * tensor.bytes)
    return held_bytes_after(tensor, layout)


def held_bytes_after(tensor: Tensor, target: Layout) -> HeldBytes:
    """Return what a tensor takes besides, after an exchange has brought it to another layout."""
    if tensor.kind == "value" and not tensor.is_kept:
        return HeldBytes()
    return HeldBytes(spread=tensor.bytes) if target.kind is LayoutKind.SPLIT else HeldBytes(copied=tensor.bytes)


@dataclass(frozen=True, slots=True)
class Limits:
    """What (1) allows; without bound where memory is ample."""

    least: float = math.inf
    total: float = math.inf
    num_devices: int = 1

    @classmethod
    def of(cls, memory_bytes: Sequence[float], problem: TensorProgram) -> Limits:
        """Return the limits of these devices, or none if even copies of everything fit."""
        worst = sum(
            2 * sum(held_bytes(tensor, COPY)) for tensor in problem.tensors
        )  # and as much once more for changes
        if worst <= min(memory_bytes, default=math.inf):
            return cls(num_devices=len(memory_bytes))
        return cls(min(memory_bytes), math.fsum(memory_bytes), len(memory_bytes))

    @property
    def bind(self) -> bool:
        """Tell whether there are limits."""
        return self.total < math.inf

    def allow(self, bytes_held: HeldBytes) -> bool:
        """Tell whether some ratios fit."""
        copied, spread = bytes_held
        return copied <= self.least and spread + self.num_devices * copied <= self.total


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a device of share r_s in segment s holds: `copied + sum_s spread[s] r_s`."""

    copied: float
    spread: tuple[float, ...]

    def on_device(self, index: int, ratios: Sequence[Sequence[float]]) -> float:
        """Return the bytes of a device."""
        return self.copied + math.fsum(s * shares[index] for s, shares in zip(self.spread, ratios, strict=True))
