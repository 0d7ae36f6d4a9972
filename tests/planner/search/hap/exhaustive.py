"""Every program there is, for small problems: no state is dropped, no layout is chosen for being cheap."""

from __future__ import annotations

from collections.abc import Iterator

from hetu_fx.planner.search.hap.expand import Expansion
from hetu_fx.planner.search.hap.op_program import HapProgram
from hetu_fx.planner.search.hap.search import program_bytes
from hetu_fx.planner.search.hap.synthesis import OpChoice
from hetu_fx.planner.search.hap.synthesised_program import assemble
from hetu_fx.planner.search.hap.tensor_states import COPY, Bytes, Layout, LayoutKind, split
from hetu_fx.planner.search.hap.tensor_states import changes as changes_of

State = dict[str, tuple[Layout, ...]]


def programs(expansion: Expansion) -> Iterator[tuple[HapProgram, Bytes]]:
    """Yield all programs, with what they hold."""
    for choices in _choices(expansion, 0, {}):
        program = assemble(expansion, choices)
        yield program, program_bytes(program, expansion.problem, zero=expansion.zero)


def fastest(expansion: Expansion) -> float:
    """Return the least seconds of all programs that some ratios let fit; infinite if there is none."""
    prices, limits = expansion.prices, expansion.limits
    fitting = (
        program
        for program, held in programs(expansion)
        if held.copied <= limits.least and sum(held.spread) + prices.num_devices * held.copied <= limits.total
    )
    return min((program.seconds(prices.speeds, prices.ratios) for program in fitting), default=float("inf"))


def _choices(expansion: Expansion, index: int, state: State) -> Iterator[list[OpChoice]]:
    if index == len(expansion.problem.ops):
        yield []
        return
    for number, form in enumerate(expansion.forms[index]):
        op = expansion.problem.ops[index]
        wanted = [(name, layout) for name, layout in zip(op.reads, form.reads, strict=True) if layout is not None]
        for after, homes, changes in _brought(expansion, op.segment, state, wanted):
            made = {name: (layout,) for name, layout in zip(op.makes, form.makes, strict=True)}
            first = OpChoice(index, number, homes, changes)
            for rest in _choices(expansion, index + 1, {**after, **made}):
                yield [first, *rest]


Homes = tuple[tuple[str, Layout], ...]
Changes = tuple[tuple[str, Layout, Layout], ...]


def _brought(
    expansion: Expansion, segment: int, state: State, wanted: list[tuple[str, Layout]]
) -> Iterator[tuple[State, Homes, Changes]]:
    """Yield all ways to bring operands to layouts."""
    if not wanted:
        yield state, (), ()
        return
    (name, layout), *others = wanted
    tensor = expansion.problem.by_name[name]
    starts: list[tuple[State, Homes]] = [(state, ())]
    if tensor.kind == "input":
        if layout.kind is LayoutKind.PARTIAL:
            return
        yield from _brought(expansion, segment, state, others)
        return
    if name not in state:
        assert tensor.kind == "parameter"
        least = expansion.prices.num_devices
        dims = [split(dim, segment) for dim, size in enumerate(tensor.shape) if size >= least]
        starts = [({**state, name: (home,)}, ((name, home),)) for home in (COPY, *dims)]
    for start, homes in starts:
        have = start[name]
        sources = (
            [None]
            if layout in have
            else [source for source in have if source == layout or any(True for _ in changes_of(source, layout))]
        )
        for source in sources:
            now = start if source is None else {**start, name: (*have, layout)}
            change = () if source is None else ((name, source, layout),)
            for after, more_homes, more_changes in _brought(expansion, segment, now, others):
                yield after, homes + more_homes, change + more_changes
