"""A problem as what is done in one go: ops, and repeated blocks, each distinct one of which is searched once.

Two blocks are equal when their ops do the same to tensors of the same description, taken in order of
appearance. From each state in which a block is entered, all ends that some continuation may need are worked
out on the first of its kind, and told of the others by the tensors' order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hetu_fx.planner.search.hap.dominance import Layouts, State
from hetu_fx.planner.search.hap.expand import Expansion, OpChoice, OpMove
from hetu_fx.planner.search.hap.memory import HeldBytes
from hetu_fx.planner.search.hap.prices import Vector
from hetu_fx.planner.search.hap.span import Span
from hetu_fx.planner.search.hap.synthesis import Item, Label, best_first
from hetu_fx.planner.values.tensor_program import Op, TensorProgram

MOST_ENTRIES = 8
"""A block is searched from so many states, those that took least."""


def items_of(expansion: Expansion, *, blocks_once: bool = True) -> list[Item]:
    """Return the items of a problem, in order; blocks that come once, or all of them if asked, as their ops."""
    ops: list[Item] = [OpItem(expansion, index) for index in range(len(expansion.problem.ops))]
    items: list[Item] = []
    at = 0
    for start, stop, searched in _repeated(expansion, ops) if blocks_once else ():
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

    def moves(self, state: State) -> Iterator[OpMove]:
        """Yield what can be done from a state, with the whole state after it."""
        for move in self.expansion.moves(self.index, dict(state)):
            after = _with_layouts(state, self.expansion.problem, move.layouts, self.index)
            yield move._replace(layouts=after)

    @property
    def least_work(self) -> Vector:
        """Return seconds on each device that can be the slowest that no form goes below."""
        return self.expansion.least_work(self.index)


@dataclass
class _EqualBlocks:
    """Equal blocks: the ops of the first, and its ends by entry."""

    expansion: Expansion
    items: Sequence[Item]
    names: tuple[str, ...]
    start: int
    ends: dict[State, tuple[OpMove, ...]] = field(default_factory=dict)
    is_exact: bool = True

    def from_entry(self, entry: State) -> tuple[OpMove, ...]:
        """Return the moves over the whole block from a state of the tensors that it touches."""
        if entry not in self.ends:
            nothing = (0.0,) * len(self.expansion.prices.per_flop)
            start = Label(entry, Span(nothing), HeldBytes())
            found, frontier = best_first(self.expansion, self.items, start, first_only=False)
            self.is_exact = self.is_exact and frontier.is_exact
            self.ends[entry] = tuple(OpMove(e.layouts, e.span, e.held, e.all_choices()) for e in found)
        return self.ends[entry]


@dataclass(frozen=True)
class BlockItem:
    """One of several equal blocks; `names` are its tensors, in the order of those of its kind."""

    kind: _EqualBlocks
    names: tuple[str, ...]
    start: int
    most_entries: int | None = MOST_ENTRIES

    def moves(self, state: State) -> Iterator[OpMove]:
        """Yield what can be done from a state."""
        entry = tuple(sorted((self._to_kind[name], have) for name, have in state if name in self._to_kind))
        beside = [(name, have) for name, have in state if name not in self._to_kind]
        for move in self.kind.from_entry(entry):
            own = [(self._from_kind[name], have) for name, have in move.layouts]
            choices = tuple(self._told(choice) for choice in move.choices)
            yield move._replace(layouts=tuple(sorted([*beside, *own])), choices=choices)

    @property
    def is_exact(self) -> bool:
        """Tell whether no end of the block was left out."""
        return self.kind.is_exact

    @cached_property
    def least_work(self) -> Vector:
        """Return seconds on each device that can be the slowest that no move goes below."""
        return tuple(map(sum, zip(*(item.least_work for item in self.kind.items), strict=True)))

    @cached_property
    def _to_kind(self) -> Mapping[str, str]:
        return dict(zip(self.names, self.kind.names, strict=True))

    @cached_property
    def _from_kind(self) -> Mapping[str, str]:
        return dict(zip(self.kind.names, self.names, strict=True))

    def _told(self, choice: OpChoice) -> OpChoice:
        """Return a choice of the first block as one of this block."""
        return choice._replace(
            op=choice.op - self.kind.start + self.start,
            homes=tuple((self._from_kind[name], layout) for name, layout in choice.homes),
            changes=tuple((self._from_kind[name], *layouts) for name, *layouts in choice.changes),  # type: ignore[misc]
        )


def _repeated(expansion: Expansion, ops: Sequence[Item]) -> Iterator[tuple[int, int, Item]]:
    """Yield (start, stop, item) of the blocks that come more than once."""
    described = [
        (start, stop, *_description(expansion.problem, start, stop)) for start, stop in expansion.problem.blocks
    ]
    all_described = [description for *_, description in described]
    kinds: dict[Hashable, _EqualBlocks] = {}
    for start, stop, names, description in described:
        if all_described.count(description) > 1:
            if description not in kinds:
                kinds[description] = _EqualBlocks(expansion, ops[start:stop], names, start)
            yield start, stop, BlockItem(kinds[description], names, start)


def _description(problem: TensorProgram, start: int, stop: int) -> tuple[tuple[str, ...], Hashable]:
    """Return the tensors that ops touch, in order of appearance, and what makes equal blocks equal."""
    ops = problem.ops[start:stop]
    names = tuple(dict.fromkeys(name for op in ops for name in (*op.reads, *op.makes)))
    numbers = {name: number for number, name in enumerate(names)}
    made_here = {name for op in ops for name in op.makes}
    tensors = tuple(
        (
            replace(problem.by_name[name], name=""),
            name in made_here,
            problem.last_use.get(name, -1) >= stop,
            _is_known_before(problem, name, start),
        )
        for name in names
    )
    return names, (tensors, tuple(_op_description(op, numbers) for op in ops))


def _is_known_before(problem: TensorProgram, name: str, start: int) -> bool:
    return problem.first_use.get(name, start) < start


def _op_description(op: Op, numbers: Mapping[str, int]) -> Hashable:
    """Return an op with its tensors and factors by number."""
    factors = {
        name: str(i) for i, name in enumerate(dict.fromkeys(f for dims in (*op.operands, *op.results) for f in dims))
    }
    return replace(
        op,
        name="",
        reads=tuple(str(numbers[name]) for name in op.reads),
        makes=tuple(str(numbers[name]) for name in op.makes),
        operands=tuple(tuple(factors[f] for f in dims) for dims in op.operands),
        results=tuple(tuple(factors[f] for f in dims) for dims in op.results),
        whole=frozenset(factors[f] for f in op.whole if f in factors),
    )
