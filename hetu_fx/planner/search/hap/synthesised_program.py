"""What is decided in one go, the program that the decisions make, and what the search returns of it.

An item is an op or a repeated block; each distinct block is searched once. Two blocks are equal when their ops do the
same to tensors of the same description, taken in order of appearance. From each state in which a block is entered, all
ends that some continuation may need are worked out on the first of its kind, and told of the others by the tensors'
order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.expand import Expansion
from hetu_fx.planner.search.hap.op_program import HapProgram, HapStep, LayoutChange
from hetu_fx.planner.search.hap.prices import PricedCollective, Ratios, Vector
from hetu_fx.planner.search.hap.synthesis import (
    Item,
    Layouts,
    OpChoice,
    Span,
    State,
    Stretch,
    best_first,
    block_description,
)
from hetu_fx.planner.search.hap.tensor_states import Bytes, HeldBytes, Layout, LayoutKind, held_bytes
from hetu_fx.planner.values.tensor_program import TensorProgram


@dataclass(frozen=True, slots=True)
class SynthesizedProgram:
    """A program and how it was found; `is_exact`: none is faster at those ratios."""

    program: HapProgram
    num_states: int
    is_exact: bool


def synthesise(expansion: Expansion) -> SynthesizedProgram:
    """Return the fastest program at the expansion's prices.

    Raises `PlanError` when no program fits the memory, or an op cannot be done at all.
    """
    items = _items_of(expansion)
    nothing = (0.0,) * len(expansion.prices.per_flop)
    start = Span(nothing) if len(nothing) == 1 else Span(nothing, 0.0, nothing)
    ends, frontier = best_first(expansion.dominance, items, Stretch((), start, HeldBytes()), first_only=True)
    if not ends:
        raise PlanError(_nothing_found(expansion, len([taken for taken in frontier.taken if taken])))
    is_exact = frontier.is_exact and all(item.is_exact for item in items)
    program = assemble(expansion, ends[0].all_choices())
    return SynthesizedProgram(program, sum(map(len, frontier.taken)), is_exact)


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
    return HapStep(op, form, choice.homes, tuple(changes), expansion.prices.gathered(form, problem.by_name))


@dataclass(frozen=True)
class HapResult:
    """The best pair of program and ratios that was found.

    Attributes:
        program: how each op is done.
        ratios: per segment, each device's share, in the order of `ranks`.
        seconds: of a step.
        ranks, speeds: the devices, and their FLOPs per second.
        held: bytes that tensors take.
        rounds: seconds of each pair that was tried, as (program found at, after the ratio programme).
        num_states: states that were taken, over all searches.
        is_exact: whether each search proved its program the fastest at its ratios.
    """

    program: HapProgram
    ratios: Ratios
    seconds: float
    ranks: tuple[int, ...]
    speeds: tuple[float, ...]
    held: Bytes
    rounds: tuple[tuple[float, float], ...] = ()
    num_states: int = 0
    is_exact: bool = True

    @property
    def transfers(self) -> tuple[PricedCollective, ...]:
        """Return the exchanges, in the order of the ops that they stand before."""
        return self.program.transfers

    @property
    def exchange_seconds(self) -> float:
        """Return the seconds of all exchanges."""
        return math.fsum(transfer.seconds(self.ratios) for transfer in self.transfers)

    @property
    def why(self) -> str:
        """Return what bounds the step, in a sentence."""
        compute = self.seconds - self.exchange_seconds
        ideal = math.fsum(sum(s.cut_flops) + s.whole_flops for s in self.program.stages) / sum(self.speeds)
        longest = max(self.transfers, key=lambda t: t.seconds(self.ratios), default=None)
        exchange = f"; longest exchange: {longest}" if longest else ""
        count = f"{len(self.transfers)} exchanges in {len(self.program.stages)} stages"
        return (
            f"{compute:.4g} s of work ({ideal:.4g} s if all of it were shared by speed) and "
            f"{self.exchange_seconds:.4g} s of {count}{exchange}"
        )


def _nothing_found(expansion: Expansion, reached: int) -> str:
    problem, limits = expansion.problem, expansion.limits
    if limits.bind:
        smallest = math.fsum(
            held_bytes(t, Layout(LayoutKind.SPLIT, 0), zero=expansion.zero).spread for t in problem.tensors
        )
        return (
            f"no program fits the memory of {limits.num_devices} devices: {limits.total / 1e6:.4g} MB together, "
            f"{limits.least / 1e6:.4g} MB the smallest. Parameters with their states and what the backward keeps "
            f"are {smallest / 1e6:.4g} MB if all of it is split\nhint: use more or larger devices, or a smaller batch"
        )
    ops = [op.name for op in problem.ops][max(0, reached - 1) :][:1]
    return f"the rules allow no program: stuck at {ops or 'the end'}\nhint: give ops that may be copied"


MOST_ENTRIES = 8
"""A block is searched from so many states, those that took least."""


def _items_of(expansion: Expansion) -> list[Item]:
    """Return the items of a problem, in order; blocks that come once as their ops."""
    ops: list[Item] = [OpItem(expansion, index) for index in range(len(expansion.problem.ops))]
    items: list[Item] = []
    at = 0
    for start, stop, searched in _repeated(expansion, ops):
        items += [*ops[at:start], searched]
        at = stop
    return [*items, *ops[at:]]


def _with_layouts(state: State, problem: TensorProgram, touched: Sequence[tuple[str, Layouts]], index: int) -> State:
    """Return the state after an op has touched tensors, without what nothing after op `index` reads."""
    after = dict(state) | dict(touched)
    return tuple(sorted((name, have) for name, have in after.items() if problem.last_use.get(name, -1) > index))


@dataclass(frozen=True)
class OpItem:
    """One op."""

    expansion: Expansion
    index: int
    most_entries: int | None = None
    is_exact: bool = True

    def moves(self, state: State) -> Iterator[Stretch]:
        """Yield what can be done from a state, with the whole state after it."""
        for move in self.expansion.moves(self.index, dict(state)):
            after = _with_layouts(state, self.expansion.problem, move.layouts, self.index)
            yield move._replace(layouts=after)

    @property
    def least_work(self) -> Vector:
        """Return seconds on each device that can be the slowest that no form goes below."""
        return self.expansion.least_work[self.index]


@dataclass
class _EqualBlocks:
    """Equal blocks: the ops of the first, and its ends by entry."""

    expansion: Expansion
    items: Sequence[Item]
    names: tuple[str, ...]
    start: int
    ends: dict[State, tuple[Stretch, ...]] = field(default_factory=dict)
    is_exact: bool = True

    def from_entry(self, entry: State) -> tuple[Stretch, ...]:
        """Return the moves over the whole block from a state of the tensors that it touches."""
        if entry not in self.ends:
            nothing = (0.0,) * len(self.expansion.prices.per_flop)
            start = Stretch(entry, Span(nothing), HeldBytes())
            found, frontier = best_first(self.expansion.dominance, self.items, start, first_only=False)
            self.is_exact = self.is_exact and frontier.is_exact
            self.ends[entry] = tuple(Stretch(e.layouts, e.span, e.held, e.all_choices()) for e in found)
        return self.ends[entry]


@dataclass(frozen=True)
class BlockItem:
    """One of several equal blocks, with the names of its tensors in the first of its kind, and the other way round."""

    kind: _EqualBlocks
    start: int
    to_kind: Mapping[str, str]
    from_kind: Mapping[str, str]
    most_entries: int | None = MOST_ENTRIES

    def moves(self, state: State) -> Iterator[Stretch]:
        """Yield what can be done from a state."""
        entry = tuple(sorted((self.to_kind[name], have) for name, have in state if name in self.to_kind))
        beside = [(name, have) for name, have in state if name not in self.to_kind]
        for move in self.kind.from_entry(entry):
            own = [(self.from_kind[name], have) for name, have in move.layouts]
            choices = tuple(self._told(choice) for choice in move.choices)
            yield move._replace(layouts=tuple(sorted([*beside, *own])), choices=choices)

    @property
    def is_exact(self) -> bool:
        """Tell whether no end of the block was left out."""
        return self.kind.is_exact

    @property
    def least_work(self) -> Vector:
        """Return seconds on each device that can be the slowest that no move goes below."""
        return tuple(map(sum, zip(*(item.least_work for item in self.kind.items), strict=True)))

    def _told(self, choice: OpChoice) -> OpChoice:
        """Return a choice of the first block as one of this block."""
        return choice._replace(
            op=choice.op - self.kind.start + self.start,
            homes=tuple((self.from_kind[name], layout) for name, layout in choice.homes),
            changes=tuple((self.from_kind[name], *layouts) for name, *layouts in choice.changes),  # type: ignore[misc]
        )


def _repeated(expansion: Expansion, ops: Sequence[Item]) -> Iterator[tuple[int, int, Item]]:
    """Yield (start, stop, item) of the blocks that come more than once."""
    described = [
        (start, stop, *block_description(expansion.problem, start, stop)) for start, stop in expansion.problem.blocks
    ]
    all_described = [description for *_, description in described]
    kinds: dict[Hashable, _EqualBlocks] = {}
    for start, stop, names, description in described:
        if all_described.count(description) > 1:
            if description not in kinds:
                kinds[description] = _EqualBlocks(expansion, ops[start:stop], names, start)
            kind = kinds[description]
            to_kind, from_kind = (dict(zip(*two, strict=True)) for two in ((names, kind.names), (kind.names, names)))
            yield start, stop, BlockItem(kind, start, to_kind, from_kind)
