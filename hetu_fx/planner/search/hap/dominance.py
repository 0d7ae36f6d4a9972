"""Which state makes another one needless.

A state is dropped when another one as far is no slower even after it has changed its layouts to those of the
first: whatever follows the first can follow the other. With limits of memory it must hold no more, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from hetu_fx.planner.search.hap.forms import SynthesisRules
from hetu_fx.planner.search.hap.memory import HeldBytes, Limits, held_after
from hetu_fx.planner.search.hap.prices import RatioPrices
from hetu_fx.planner.search.hap.span import Span
from hetu_fx.planner.search.hap.states import Layout
from hetu_fx.planner.values.tensor_program import Tensor, TensorProgram

Layouts = tuple[Layout, ...]
"""The layouts in which a tensor is at hand: that in which it was made first."""


State = tuple[tuple[str, Layouts], ...]
"""Tensors at hand with their layouts, by name."""


class Reached(Protocol):
    """What has been come to: layouts of tensors, seconds and bytes so far."""

    @property
    def layouts(self) -> State: ...

    @property
    def span(self) -> Span: ...

    @property
    def held(self) -> HeldBytes: ...


@dataclass(frozen=True)
class Dominance:
    """Compares states of a problem at given prices."""

    problem: TensorProgram
    prices: RatioPrices
    rules: SynthesisRules
    limits: Limits
    _distances: dict[tuple[str, Layouts, Layouts], tuple[float, HeldBytes] | None] = field(
        default_factory=dict, repr=False
    )

    def serves(self, one: Reached, other: Reached) -> bool:
        """Tell whether all that can follow the other can follow the one, no later and with no more bytes.

        That is so when the one, its layouts changed to have those of the other too, is still no later.
        """
        if self.is_scalar and one.span.head[0] > other.span.head[0]:
            return False
        extra, more = 0.0, HeldBytes()
        if one.layouts != other.layouts:
            found = self._distance(one.layouts, other.layouts)
            if found is None:
                return False
            extra, more = found
        if self.limits.bind:
            held = one.held + more
            if held.copied > other.held.copied or held.spread > other.held.spread:
                return False
        return one.span.is_never_later(other.span, extra)

    @cached_property
    def is_scalar(self) -> bool:
        """Tell whether one device stands for all."""
        return len(self.prices.per_flop) == 1

    def _distance(self, one: State, other: State) -> tuple[float, HeldBytes] | None:
        """Return seconds and bytes of changing the one's layouts to have all of the other's."""
        seconds, held = 0.0, HeldBytes()
        for (name, have), (same, wanted) in zip(one, other, strict=True):
            assert name == same
            if have != wanted:
                found = self._tensor_distance(name, have, wanted)
                if found is None:
                    return None
                seconds += found[0]
                held = held + found[1] if self.limits.bind else held
        return seconds, held

    def _tensor_distance(self, name: str, have: Layouts, wanted: Layouts) -> tuple[float, HeldBytes] | None:
        key = name, have, wanted
        if key not in self._distances:
            self._distances[key] = self._find_distance(self.problem.by_name[name], have, wanted)
        return self._distances[key]

    def _find_distance(self, tensor: Tensor, have: Layouts, wanted: Layouts) -> tuple[float, HeldBytes] | None:
        if self.rules.one_change or not tensor.movable:
            return None
        seconds, held = 0.0, HeldBytes()
        for layout in set(wanted) - set(have):
            options = [self.change_seconds(tensor, source, layout) for source in have]
            known = [option for option in options if option is not None]
            if not known:
                return None
            seconds += min(known)
            held += held_after(tensor, layout)
        return seconds, held

    def change_seconds(self, tensor: Tensor, source: Layout, target: Layout) -> float | None:
        """Return the seconds of a change of layout; None if it cannot be."""
        transfers = self.prices.change(tensor, source, target)
        return None if transfers is None else self.prices.seconds(transfers)
