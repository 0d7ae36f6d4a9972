"""Units of parameters that are gathered before they are read and let go after it (zero 3), as nodes of a module.

A unit is what a repeated block reads, or what is read before, between or after blocks; a model without blocks is cut by
bytes. A parameter belongs to the unit of its first reader, and its unit is gathered for every other reader too. Ranks
gather units in the same order, whatever their own graphs look like: a *visit* is a stretch of the whole program, the
same on all ranks, and says which units are read in it. Those who have no part of the program go through all visits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, Protocol

from torch import fx

from hetu_fx.errors import PlanError
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.transforms.lowering.block_modules import fill_gaps
from hetu_fx.transforms.specialize.device_graph import GraphSlot, SlotKind

PARTS = 8
"""Into how many units a model without blocks is cut, about."""

UNITS = GraphSlot(SlotKind.UNITS, "units")
"""What a module with units is fed with besides: the step's way through them."""


class GathersUnits(Protocol):
    """A step's way through the units."""

    def gather(self, visit: int) -> None:
        """Have the units of a visit gathered, and no others."""

    def release(self, visit: int, values: tuple[Any, ...], *, is_over: bool) -> tuple[Any, ...]:
        """Return what a part of a visit has made, by way of what gathers the visit's units again for its backward."""


def parameters(walk: GathersUnits, visit: int, *leaves: Any) -> None:
    """Gather the parameters of a visit's units, these among them: `hetu.parameters` in a module's graph."""
    walk.gather(visit)


def release(walk: GathersUnits, visit: int, is_over: bool, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let a visit's units go, if it is over: `hetu.release` in a module's graph."""
    return walk.release(visit, values, is_over=is_over)


MARKERS: Mapping[Any, tuple[str, Callable[..., Any]]] = {
    parameters: ("hetu.parameters", lambda *given: None),
    release: ("hetu.release", lambda walk, visit, is_over, values: values),
}
"""What marks units: how it is called, and what it makes where nothing is gathered."""


@dataclass(frozen=True)
class UnitPlan:
    """The units of a program, the same on all ranks.

    Attributes:
        units: the names of each unit's parameters, in the order of their first readers.
        num_bytes: of each unit, whole.
        visits: of each stretch of the program that reads parameters, in order, the units that it reads.
        unit_of: the unit of each parameter.
        begun_at: the units that each visit reads first: their gradients are whole when its backward is over.
        slots: in which buffer each unit is gathered: in none of another unit of the same visit or the next one.
    """

    units: tuple[tuple[str, ...], ...]
    num_bytes: tuple[int, ...]
    visits: tuple[frozenset[int], ...]
    unit_of: Mapping[str, int] = field(init=False, compare=False)
    begun_at: Sequence[tuple[int, ...]] = field(init=False, compare=False)
    slots: Sequence[int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit_of", self._unit_of())
        object.__setattr__(self, "begun_at", self._begun_at())
        object.__setattr__(self, "slots", self._slots())

    def _unit_of(self) -> Mapping[str, int]:
        return {name: number for number, names in enumerate(self.units) for name in names}

    def _begun_at(self) -> Sequence[tuple[int, ...]]:
        known: set[int] = set()
        found = []
        for visit in self.visits:
            found.append(tuple(sorted(visit - known)))
            known |= visit
        return found

    @property
    def most_bytes(self) -> int:
        """Return what may be gathered at once for a visit and the one after it: the bytes of the two largest units."""
        return sum(sorted(self.num_bytes)[-2:])

    def _slots(self) -> Sequence[int]:
        near: list[set[int]] = [set() for _ in self.units]
        for number, visit in enumerate(self.visits):
            others = visit.union(*self.visits[max(0, number - 1) : number + 2])
            for unit in visit:
                near[unit] |= others - {unit}
        slots: list[int] = []
        for unit, met in enumerate(near):
            taken = {slots[other] for other in met if other < unit}
            slots.append(next(slot for slot in range(unit + 1) if slot not in taken))
        return slots

    def first_of(self, names: Collection[str]) -> int:
        """Return the first visit that reads a unit of one of some parameters; after the last, if none does."""
        units = {self.unit_of[name] for name in names if name in self.unit_of}
        return next((v for v, visit in enumerate(self.visits) if units & visit), len(self.visits))

    def visit(self, names: Iterable[str], start: int) -> int:
        """Return the first visit from `start` on that reads the units of some parameters.

        Raises:
            PlanError: there is none.
        """
        units = {self.unit_of[name] for name in names}
        found = next((v for v in range(start, len(self.visits)) if units <= self.visits[v]), None)
        if found is None:
            raise PlanError(
                f"zero 3 gathers parameters unit by unit, in the order of the whole program, but this rank reads "
                f"{sorted(names)} in another order\nhint: use zero 2"
            )
        return found


def plan_units(graph: Graph, num_bytes: Mapping[str, int]) -> UnitPlan:
    """Return the units of a program; a pure function, the same on every rank. `num_bytes` are those of parameters."""
    names = {leaf.node: leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    reads = [[names[node] for node in reader.all_input_nodes if node in names] for reader in nodes]
    spans = fill_gaps([graph.block_of(node) for node in nodes]) if graph.block_paths else _by_bytes(reads, num_bytes)
    unit_of, units, visits = dict[str, int](), list[tuple[str, ...]](), list[frozenset[int]]()
    for _, pairs in groupby(zip(spans, reads, strict=True), key=lambda pair: pair[0]):
        read = dict.fromkeys(name for _, found in pairs for name in found)
        own = tuple(name for name in read if name not in unit_of)
        if own:
            unit_of.update(dict.fromkeys(own, len(units)))
            units.append(own)
        if read:
            visits.append(frozenset(unit_of[name] for name in read))
    unread = tuple(name for name in names.values() if name not in unit_of)
    units += [unread] if unread else []
    return UnitPlan(tuple(units), tuple(sum(num_bytes[n] for n in unit) for unit in units), tuple(visits))


def _by_bytes(reads: Iterable[Sequence[str]], num_bytes: Mapping[str, int]) -> Iterator[int]:
    """Yield with which unit each op goes: one ends before what would make it larger than a part of all."""
    known, number, filled = set[str](), 0, 0
    for names in reads:
        more = sum(num_bytes[name] for name in set(names) - known)
        if filled and more and (filled + more) * PARTS > sum(num_bytes.values()):
            number, filled = number + 1, 0
        filled += more
        known.update(names)
        yield number


@dataclass(frozen=True)
class Units:
    """Mark where units' parameters are gathered and let go.

    Requires: what `BlockModules` makes. `names` are those of the parameters among what the module is given, in order,
        None for what is no parameter.
    Ensures: each piece that reads parameters does so after a node that gathers them, and what it makes comes out of one
        that lets them go; both take the step's way through the units, which the module is given last.

        %piece_1 = call_module[piece_1](%x, %w)    ->    hetu.parameters(%units, 1, %w)
        %y = getitem(%piece_1, 0)                        %piece_1 = call_module[piece_1](%x, %w)
                                                         %release = hetu.release(%units, 1, True, %piece_1)
                                                         %y = getitem(%release, 0)
    """

    plan: UnitPlan
    names: tuple[str | None, ...]
    name: ClassVar[str] = "units"

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = copy.deepcopy(module.graph)
        given = list(graph.find_nodes(op="placeholder"))
        named = {node: name for node, name in zip(given, self.names, strict=True) if name is not None}
        _check_outputs(graph, named)
        with graph.inserting_after(given[-1]):
            walk = graph.placeholder(UNITS.name)
        visits = list(self._visits(graph, named))
        followers = [visit for _, visit in visits[1:]]
        for (piece, visit), follower in zip(visits, [*followers, None], strict=True):
            _mark(graph, piece, (walk, visit), [n for n in piece.all_input_nodes if n in named], visit != follower)
        return fx.GraphModule(module, graph)

    def _visits(self, graph: fx.Graph, named: Mapping[fx.Node, str]) -> Iterator[tuple[fx.Node, int]]:
        """Yield each piece that reads parameters, with its visit."""
        at = 0
        for piece in graph.find_nodes(op="call_module"):
            read = [named[node] for node in piece.all_input_nodes if node in named]
            if read:
                at = self.plan.visit(read, at)
                yield piece, at


def _check_outputs(graph: fx.Graph, named: Mapping[fx.Node, str]) -> None:
    """Refuse parameters among what a graph returns, whose memory others take turns in. Raises PlanError."""
    if found := sorted({named[node] for node in graph.output_node().all_input_nodes if node in named}):
        raise PlanError(
            f"the model returns its parameters {found} as they are, which zero 3 lets go before they are read\n"
            f"hint: use zero 2, or return a copy (.clone())"
        )


def _mark(graph: fx.Graph, piece: fx.Node, at: tuple[fx.Node, int], leaves: Sequence[fx.Node], is_over: bool) -> None:
    with graph.inserting_before(piece):
        graph.call_function(parameters, (*at, *leaves))
    with graph.inserting_after(piece):
        made = graph.call_function(release, (*at, is_over, piece))
    piece.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
