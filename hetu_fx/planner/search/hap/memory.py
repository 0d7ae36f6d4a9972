"""Bytes that tensors take in their layouts, and whether some ratios let all devices hold them.

A device holds C, the bytes of what every device has all of, and its share of S, those of what is split.
Ratios under which devices of M_i bytes hold that exist just when

    C <= min_i M_i   and   S + n C <= sum_i M_i                                                  (1)

A parameter of P bytes takes 4 P: itself, its gradient, and two moments of Adam. Copies of it share the
moments and a master copy by the ratios (zero 1) or not (zero 0), as `hetu_fx.planner.values.device_memory` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetu_fx.planner.search.hap.states import COPY, Layout, LayoutKind
from hetu_fx.planner.values.device_memory import fixed_bytes
from hetu_fx.planner.values.tensor_program import Tensor, TensorProgram


class HeldBytes(NamedTuple):
    """Bytes that every device holds, and bytes that devices share."""

    copied: float = 0.0
    spread: float = 0.0

    def __add__(self, other: object) -> HeldBytes:
        assert isinstance(other, HeldBytes)
        return HeldBytes(self.copied + other.copied, self.spread + other.spread)


def held(tensor: Tensor, layout: Layout, *, zero: int = 1) -> HeldBytes:
    """Return what a tensor takes in a layout: a parameter with all its states, a value if it is kept."""
    is_split = layout.kind is LayoutKind.SPLIT
    if tensor.kind == "parameter" and tensor.has_gradient:
        whole = sum(count for _, count in fixed_bytes(tensor.bytes, zero=0, num_replicas=1))
        if is_split:
            return HeldBytes(spread=whole)
        if not zero:
            return HeldBytes(copied=whole)
        return HeldBytes(2 * tensor.bytes, 3 * tensor.bytes)
    return held_after(tensor, layout)


def held_after(tensor: Tensor, target: Layout) -> HeldBytes:
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
        worst = sum(2 * sum(held(tensor, COPY)) for tensor in problem.tensors)  # and as much once more for changes
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
