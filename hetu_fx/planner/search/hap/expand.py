"""What can be done next: an op in each of its forms, with the changes of layout that its operands need.

Of the ways to bring an operand to a layout the fastest is taken: they leave the same behind. Where a parameter
is held is decided by the first op that reads it; if memory binds, holding it in parts is a choice of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.op_forms import OpForm, SynthesisRules, op_forms
from hetu_fx.planner.search.hap.prices import RatioPrices, Vector
from hetu_fx.planner.search.hap.synthesis import Dominance, Layouts, OpChoice, Span, Stretch
from hetu_fx.planner.search.hap.tensor_states import (
    COPY,
    HeldBytes,
    Layout,
    LayoutKind,
    Limits,
    held_bytes,
    held_bytes_after,
    split,
)
from hetu_fx.planner.values.tensor_program import Tensor, TensorProgram


@dataclass(frozen=True, slots=True)
class _Way:
    """Operands brought to the layouts of a form, one after another."""

    layouts: Mapping[str, Layouts]
    homes: tuple[tuple[str, Layout], ...] = ()
    changes: tuple[tuple[str, Layout, Layout], ...] = ()
    seconds: float = 0.0
    ends_stage: bool = False
    held: HeldBytes = field(default_factory=HeldBytes)


@dataclass(frozen=True)
class Expansion:
    """The moves of a problem at given prices.

    `forms` are those of each op, `least_work` what seconds on each device that can be the slowest none of them goes
    below, `dominance` which states serve for which.
    """

    problem: TensorProgram
    prices: RatioPrices
    rules: SynthesisRules
    limits: Limits
    zero: int = 1
    forms: tuple[tuple[OpForm, ...], ...] = field(init=False, repr=False)
    least_work: tuple[Vector, ...] = field(init=False, repr=False)
    dominance: Dominance = field(init=False, repr=False)
    _known: dict[tuple[int, tuple[Layouts, ...]], tuple[Stretch, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        count = self.prices.num_devices
        found = tuple(op_forms(op, self.problem, self.rules, count) for op in self.problem.ops)
        without = [op.name for op, forms in zip(self.problem.ops, found, strict=True) if not forms]
        if without:
            raise PlanError(f"ops {without} can be done in no form by {count} devices\nhint: allow them to be copied")
        works = ([self.prices.work(form) for form in forms] for forms in found)
        object.__setattr__(self, "forms", found)
        object.__setattr__(self, "least_work", tuple(tuple(map(min, zip(*each, strict=True))) for each in works))
        object.__setattr__(self, "dominance", Dominance(self.problem, self.prices, self.rules, self.limits))

    def moves(self, index: int, layouts: Mapping[str, Layouts]) -> tuple[Stretch, ...]:
        """Return the moves of an op, `layouts` being those of what has been made and of parameters in use."""
        names = dict.fromkeys(self.problem.ops[index].reads)
        key = index, tuple(layouts.get(name, ()) for name in names)
        if key not in self._known:
            here = dict(zip(names, key[1], strict=True))
            found = [move for number in range(len(self.forms[index])) for move in self._moves(index, number, here)]
            self._known[key] = self._undominated(found)
        return self._known[key]

    def _undominated(self, moves: Sequence[Stretch]) -> tuple[Stretch, ...]:
        """Return the moves without those that another one serves for."""
        kept: list[Stretch] = []
        for move in sorted(moves, key=lambda move: move.span.seconds):
            if not any(self.dominance.serves(other, move) for other in kept):
                kept.append(move)
        return tuple(kept)

    def _moves(self, index: int, number: int, layouts: Mapping[str, Layouts]) -> Iterator[Stretch]:
        op, form = self.problem.ops[index], self.forms[index][number]
        gathers = self.prices.seconds(self.prices.gathered(form, self.problem.by_name))
        for way in self._ways(index, form, layouts):
            after = dict(way.layouts) | {name: (made,) for name, made in zip(op.makes, form.makes, strict=True)}
            left = tuple(sorted((name, have) for name, have in after.items() if self._matters(name, index)))
            more = HeldBytes()
            if self.limits.bind:
                made = zip(op.makes, form.makes, strict=True)
                more = sum((held_bytes(self._tensor(name), layout, zero=self.zero) for name, layout in made), way.held)
            choice = OpChoice(index, number, way.homes, way.changes)
            yield Stretch(left, self._span(form, way.seconds + gathers, way.ends_stage), more, (choice,))

    def _matters(self, name: str, index: int) -> bool:
        return self._tensor(name).kind != "input" and self.problem.last_use.get(name, -1) > index

    def _span(self, form: OpForm, exchange: float, ends_stage: bool) -> Span:
        work = self.prices.work(form)
        if len(work) > 1 and (ends_stage or self.rules.waits_after_each_op):
            nothing = (0.0,) * len(work)
            if self.rules.waits_after_each_op:
                return Span(nothing, max(work) + exchange, nothing)
            return Span(nothing, exchange, work)
        return Span(tuple(seconds + exchange for seconds in work))

    def _ways(self, index: int, form: OpForm, layouts: Mapping[str, Layouts]) -> list[_Way]:
        ways = [_Way({name: have for name, have in layouts.items() if have})]
        for name, wanted in zip(self.problem.ops[index].reads, form.reads, strict=True):
            if wanted is not None:
                tensor = self._tensor(name)
                ways = [new for way in ways for new in self._with_operand(index, tensor, wanted, way)]
        return ways

    def _with_operand(self, index: int, tensor: Tensor, wanted: Layout, way: _Way) -> Iterator[_Way]:
        if tensor.kind == "input":
            if wanted.kind in (LayoutKind.COPY, LayoutKind.SPLIT):
                yield way
        elif tensor.name in way.layouts:
            if (new := self._changed(tensor, wanted, way)) is not None:
                yield new
        elif tensor.kind == "parameter":
            yield from self._held(index, tensor, wanted, way)

    def _changed(self, tensor: Tensor, wanted: Layout, way: _Way) -> _Way | None:
        """Return the way with the operand in the wanted layout, at the least seconds there are."""
        have = way.layouts[tensor.name]
        if wanted in have:
            return way
        if not tensor.movable or (self.rules.one_change and len(have) > 1):
            return None
        options = [(self.dominance.change_seconds(tensor, source, wanted), source) for source in have]
        possible = [(seconds, source) for seconds, source in options if seconds is not None]
        if not possible:
            return None
        seconds, source = min(possible)
        return self._after_change(tensor, source, wanted, seconds, way)

    def _after_change(self, tensor: Tensor, source: Layout, wanted: Layout, seconds: float, way: _Way) -> _Way:
        transfers = self.prices.change(tensor, source, wanted) or ()
        stays = bool(transfers) or self.rules.one_change  # what is free can be had again
        layouts = dict(way.layouts)
        if stays:
            first, *others = layouts[tensor.name]
            layouts[tensor.name] = (first, *sorted((*others, wanted)))
        more = HeldBytes()
        if self.limits.bind and any(not transfer.is_backward for transfer in transfers):
            more = held_bytes_after(tensor, wanted)
        return _Way(
            layouts,
            way.homes,
            (*way.changes, (tensor.name, source, wanted)),
            way.seconds + seconds,
            way.ends_stage or (bool(transfers) and tensor.kind != "parameter"),
            way.held + more,
        )

    def _held(self, index: int, tensor: Tensor, wanted: Layout, way: _Way) -> Iterator[_Way]:
        """Yield the ways to hold a parameter: all that its later readers or memory may need, else the fastest."""
        found = []
        for home in self._homes(index, tensor, wanted):
            more = held_bytes(tensor, home, zero=self.zero) if self.limits.bind else HeldBytes()
            layouts = {**way.layouts, tensor.name: (home,)}
            homes = (*way.homes, (tensor.name, home))
            start = _Way(layouts, homes, way.changes, way.seconds, way.ends_stage, way.held + more)
            if (new := self._changed(tensor, wanted, start)) is not None:
                found.append(new)
        if self.limits.bind or self._matters(tensor.name, index):
            yield from found
        elif found:
            yield min(found, key=lambda new: new.seconds)

    def _homes(self, index: int, tensor: Tensor, wanted: Layout) -> Sequence[Layout]:
        op = self.problem.ops[index]
        least = self.prices.num_devices * self.rules.smallest_units
        splits = [split(dim, op.segment) for dim, size in enumerate(tensor.shape) if size >= least]
        if self._matters(tensor.name, index) or op.reads.count(tensor.name) > 1:
            return [COPY, *splits]
        if wanted.kind is LayoutKind.SPLIT:
            return [wanted]
        return [COPY, *splits[:1]]

    def _tensor(self, name: str) -> Tensor:
        return self.problem.by_name[name]
