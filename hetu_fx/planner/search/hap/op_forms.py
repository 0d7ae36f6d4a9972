"""The ways to do an op on all devices: whole on each, cut on a factor, or on partial operands.

Cut on a factor, operands that have it are split there, others are SHARED; results that have it are split, and
if none has it they are partial. An operand's layout says with it what becomes of the gradient, so every form is
sound forward and backward.

A parameter that is SHARED costs an all-reduce of its gradient. Sufficient-factor broadcasting makes the
gradient complete instead: what it is computed from, the split operands and the results' gradients, is gathered
in the backward, and every device does all of that product (HAP, EuroSys 2024, abstract).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetu_fx.planner.search.hap.tensor_states import COPY, PARTIAL, SHARED, Layout, split
from hetu_fx.planner.values.tensor_program import Op, Tensor, TensorProgram


@dataclass(frozen=True, slots=True)
class SynthesisRules:
    """What the search may do and how it counts; the defaults are sound and best, `RELEASED` is as published.

    Attributes:
        tracks_gradients: copies and shared tensors are told apart; else every copy is shared.
        sufficient_factors: parameters' gradients may be made from gathered factors.
        one_change: the layout of a tensor may be changed once.
        waits_after_each_op: devices wait for each other after each op; else only when they exchange activations.
        drops_constants: the ratio programme leaves out what does not depend on ratios.
        smallest_units: a dim can be cut if it has so many indices for each device.
    """

    tracks_gradients: bool = True
    sufficient_factors: bool = True
    one_change: bool = False
    waits_after_each_op: bool = False
    drops_constants: bool = False
    smallest_units: int = 1


RELEASED = SynthesisRules(
    tracks_gradients=False,
    sufficient_factors=False,
    one_change=True,
    waits_after_each_op=True,
    drops_constants=True,
    smallest_units=0,
)
"""As HAP's released code does it, quirks included; its elements for bytes are for the problem to say."""


class OpForm(NamedTuple):
    """One way to do an op.

    Attributes:
        cut: the factor that is cut; None if all devices do the same work.
        segment: whose ratios the parts follow.
        reads: layout of each operand; None where it does not matter.
        makes: layout of each result.
        cut_flops, whole_flops: work that devices share by the ratios, and that each of them does.
        gathered: what sufficient-factor broadcasting gathers in the backward, by tensor name.
        units: size of the factor that is cut.
    """

    cut: str | None
    segment: int
    reads: tuple[Layout | None, ...]
    makes: tuple[Layout, ...]
    cut_flops: float = 0.0
    whole_flops: float = 0.0
    gathered: tuple[str, ...] = ()
    units: int = 0

    def __str__(self) -> str:
        if self.cut is None:
            return "whole" if PARTIAL not in self.makes else "on partials"
        return f"cut on {self.cut}" + (", from sufficient factors" if self.gathered else "")


def op_forms(op: Op, problem: TensorProgram, rules: SynthesisRules, num_devices: int) -> tuple[OpForm, ...]:
    """Return the forms of an op, in a fixed order without repeats."""
    forms = _Forms(op, problem, rules, num_devices)
    return tuple(dict.fromkeys((*forms.whole(), *forms.on_summands(), *forms.cut())))


def from_factors(op: Op, form: OpForm, ends: Sequence[int], problem: TensorProgram) -> OpForm:
    """Return a form whose gradients of the operands at `ends` every device makes from gathered factors."""
    reads = tuple(COPY if i in ends else layout for i, layout in enumerate(form.reads))
    repeated = math.fsum(problem.backward_flops(op)[i] for i in ends)
    gathered = [n for n, layout in zip(op.reads, form.reads, strict=True) if layout and layout.dim >= 0]
    gathered += [n for n in op.makes if problem.by_name[n].has_gradient]
    return form._replace(
        reads=reads,
        cut_flops=form.cut_flops - repeated,
        whole_flops=repeated,
        gathered=tuple(dict.fromkeys(gathered)),
    )


def _gradient_bearing(tensor: Tensor, layout: Layout, rules: SynthesisRules) -> Layout:
    """Return a layout as the rules know it: copies without gradient are COPY, others may all be SHARED."""
    if layout not in (COPY, SHARED):
        return layout
    if not tensor.has_gradient:
        return COPY
    return layout if rules.tracks_gradients else SHARED


@dataclass(frozen=True, slots=True)
class _Forms:
    op: Op
    problem: TensorProgram
    rules: SynthesisRules
    num_devices: int

    def whole(self) -> Iterator[OpForm]:
        """Yield the forms in which all devices do all; gradients may be partial all the same."""
        if self.op.copyable:
            flops = self.problem.all_flops(self.op)
            for layout in (COPY, SHARED):
                reads = self._reads([layout] * len(self.op.reads))
                makes = tuple(self._known(name, layout) for name in self.op.makes)
                yield OpForm(None, self.op.segment, reads, makes, whole_flops=flops)

    def on_summands(self) -> Iterator[OpForm]:
        """Yield the forms in which operands that the op is linear in are partial, and so are results."""
        flops = self.problem.all_flops(self.op)
        for positions in self.op.linear:
            reads = self._reads([PARTIAL if i in positions else SHARED for i in range(len(self.op.reads))])
            yield OpForm(None, self.op.segment, reads, (PARTIAL,) * len(self.op.makes), whole_flops=flops)

    def cut(self) -> Iterator[OpForm]:
        """Yield the forms in which one factor is cut."""
        for factor in self.op.factors:
            if self._can_cut(factor):
                form = self._cut(factor)
                yield form
                if self._may_send(factor) and (other := self._from_sufficient_factors(factor, form)):
                    yield other

    def _may_send(self, factor: str) -> bool:
        return self.rules.sufficient_factors and (self.op.sends_factors is None or factor in self.op.sends_factors)

    def _can_cut(self, factor: str) -> bool:
        names = (*self.op.operands, *self.op.results)
        is_once = max(dims.count(factor) for dims in names) == 1
        in_results = {factor in dims for dims in self.op.results}
        enough = self.problem.size(self.op, factor) >= self.num_devices * self.rules.smallest_units
        return factor not in self.op.whole and is_once and len(in_results) == 1 and enough

    def _cut(self, factor: str) -> OpForm:
        reads = self._reads([self._split_or(names, factor, SHARED) for names in self.op.operands])
        makes = tuple(self._split_or(names, factor, PARTIAL) for names in self.op.results)
        flops = self.problem.all_flops(self.op)
        return OpForm(factor, self.op.segment, reads, makes, cut_flops=flops, units=self.problem.size(self.op, factor))

    def _from_sufficient_factors(self, factor: str, form: OpForm) -> OpForm | None:
        """Return the form that leaves no parameter's gradient partial, if the op has such parameters."""
        ends = [i for i, layout in enumerate(form.reads) if layout == SHARED and self._is_factor(i)]
        if not any(self.problem.backward_flops(self.op)[i] for i in ends):
            return None
        if any(layout == PARTIAL for layout in form.makes):
            return None  # each result's gradient is whole, but what a partial is made from is not
        return from_factors(self.op, form, ends, self.problem)

    def _is_factor(self, position: int) -> bool:
        """Tell whether an operand is a parameter that the op is linear in."""
        is_parameter = self._tensor(self.op.reads[position]).kind == "parameter"
        return is_parameter and any(position in positions for positions in self.op.linear)

    def _reads(self, layouts: Sequence[Layout]) -> tuple[Layout | None, ...]:
        pairs = zip(self.op.reads, layouts, strict=True)
        known = (self._known(name, layout) for name, layout in pairs)
        return tuple(None if i in self.op.unread else layout for i, layout in enumerate(known))

    def _split_or(self, names: Sequence[str], factor: str, other: Layout) -> Layout:
        return split(names.index(factor), self.op.segment) if factor in names else other

    def _known(self, name: str, layout: Layout) -> Layout:
        return _gradient_bearing(self._tensor(name), layout, self.rules)

    def _tensor(self, name: str) -> Tensor:
        return self.problem.by_name[name]
