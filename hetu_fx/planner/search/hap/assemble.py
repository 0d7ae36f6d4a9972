"""From numbered choices to a program with its exchanges, and what its tensors take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.expand import Expansion, OpChoice
from hetu_fx.planner.search.hap.items import items_of
from hetu_fx.planner.search.hap.memory import HeldBytes, held, held_after
from hetu_fx.planner.search.hap.prices import Ratios
from hetu_fx.planner.search.hap.program import HapProgram, HapStep, LayoutChange
from hetu_fx.planner.search.hap.span import Span
from hetu_fx.planner.search.hap.states import Layout, LayoutKind
from hetu_fx.planner.search.hap.synthesis import Label, best_first
from hetu_fx.planner.values.tensor_program import TensorProgram


@dataclass(frozen=True, slots=True)
class Synthesised:
    """A program and how it was found; `is_exact`: none is faster at those ratios."""

    program: HapProgram
    num_states: int
    is_exact: bool


def synthesise(expansion: Expansion, *, blocks_once: bool = True) -> Synthesised:
    """Return the fastest program at the expansion's prices.

    Raises `PlanError` when no program fits the memory, or an op cannot be done at all.
    """
    items = items_of(expansion, blocks_once=blocks_once)
    nothing = (0.0,) * len(expansion.prices.per_flop)
    start = Span(nothing) if len(nothing) == 1 else Span(nothing, 0.0, nothing)
    ends, frontier = best_first(expansion, items, Label((), start, HeldBytes()), first_only=True)
    if not ends:
        raise PlanError(_nothing_found(expansion, len([taken for taken in frontier.taken if taken])))
    is_exact = frontier.is_exact and all(item.is_exact for item in items)
    program = assemble(expansion, ends[0].all_choices())
    return Synthesised(program, sum(map(len, frontier.taken)), is_exact)


def assemble(expansion: Expansion, choices: Sequence[OpChoice]) -> HapProgram:
    """Return the program of choices, its exchanges as they are fastest at the expansion's ratios."""
    steps = tuple(_step(expansion, choice) for choice in choices)
    problem, rules = expansion.problem, expansion.rules
    return HapProgram(steps, problem.num_segments, rules.waits_after_each_op)


def _step(expansion: Expansion, choice: OpChoice) -> HapStep:
    problem = expansion.problem
    op, form = problem.ops[choice.op], expansion.forms[choice.op][choice.form]
    changes = []
    for name, source, target in choice.changes:
        tensor = problem.by_name[name]
        transfers = expansion.prices.change(tensor, source, target) or ()
        changes.append(LayoutChange(name, source, target, transfers, tensor.kind == "parameter"))
    return HapStep(op, form, choice.homes, tuple(changes), expansion.gathered(op, form))


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a device of share r_s in segment s holds: `copied + sum_s spread[s] r_s`."""

    copied: float
    spread: tuple[float, ...]

    def on_device(self, index: int, ratios: Ratios) -> float:
        """Return the bytes of a device."""
        return self.copied + math.fsum(s * shares[index] for s, shares in zip(self.spread, ratios, strict=True))


def bytes_of(program: HapProgram, problem: TensorProgram, *, zero: int = 1) -> Bytes:
    """Return what the tensors of a program take."""
    entries = [entry for step in program.steps for entry in _held(step, problem, zero)]
    spread = [0.0] * program.num_segments
    for segment, one in entries:
        spread[segment] += one.spread
    return Bytes(math.fsum(one.copied for _, one in entries), tuple(spread))


def _held(step: HapStep, problem: TensorProgram, zero: int) -> Iterator[tuple[int, HeldBytes]]:
    pairs: list[tuple[str, Layout]] = [*step.homes, *zip(step.op.makes, step.form.makes, strict=True)]
    for name, layout in pairs:
        yield _segment(layout, step), held(problem.by_name[name], layout, zero=zero)
    for change in step.changes:
        if any(not transfer.is_backward for transfer in change.transfers):
            yield _segment(change.target, step), held_after(problem.by_name[change.tensor], change.target)


def _segment(layout: Layout, step: HapStep) -> int:
    return layout.segment if layout.kind is LayoutKind.SPLIT else step.op.segment


def _nothing_found(expansion: Expansion, reached: int) -> str:
    problem, limits = expansion.problem, expansion.limits
    if limits.bind:
        smallest = math.fsum(held(t, Layout(LayoutKind.SPLIT, 0), zero=expansion.zero).spread for t in problem.tensors)
        return (
            f"no program fits the memory of {limits.num_devices} devices: {limits.total / 1e6:.4g} MB together, "
            f"{limits.least / 1e6:.4g} MB the smallest; parameters with their states and what the backward keeps "
            f"are {smallest / 1e6:.4g} MB if all of it is split; use more or larger devices, or a smaller batch"
        )
    ops = [op.name for op in problem.ops][max(0, reached - 1) :][:1]
    wanted = f"outputs {problem.outputs} as partials" if expansion.rules.partial_outputs else "no form"
    return f"the rules allow no program: stuck at {ops or 'the end'} ({wanted}); give ops that may be copied"
