"""What a captured program costs, from its graph: FLOPs, memory traffic, parameters, activations, boundaries.

FLOPs are counted by torch's own formulas, by running each distinct op on meta tensors of the example's
sizes or of given ones. Activations are what products read and make (and views of it share it), which is what min-cut
rematerialisation keeps, near enough. A value that batch and parameters reach belongs to one part; masks and
tables that only one of them reaches are computed wherever they are read, and cross no boundary.

A leaf takes what its calls have taken when it was captured (`graph.leaves.work`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from operator import add
from typing import Any, Protocol

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.torch_private import OpOverload, tree_leaves, tree_map
from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.graph import meta
from hetu_fx.graph.calls import is_view
from hetu_fx.graph.edit import descendants
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.graph.leaves.leaf_ops import LEAF, leaf_work
from hetu_fx.graph.leaves.work import LeafWork
from hetu_fx.planner.count.liveness import program_memory
from hetu_fx.planner.count.peaks import EVERYWHERE
from hetu_fx.planner.count.product_ops import contracted_size, multiplies_weights
from hetu_fx.planner.count.row_meetings import RowMeetings
from hetu_fx.planner.values.exchanged_values import RowSums, TiedParameter
from hetu_fx.planner.values.footprint import ProgramMemory
from hetu_fx.planner.values.part_costs import NO_COSTS, PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.work_shares import WorkShares

LEAF_CALLS = 4 / 3
"""How many calls of a leaf count for one: backward calls it again, so that it takes four forwards, other ops three."""

_COPIES = 8  # of a parameter: gradients, states and sums of them on their way; of a value: two, with its gradient


class FlopCounter:
    """Counts the FLOPs of ops by running them on meta tensors; equal calls are run once.

    `size_of` says what a size is; left out: as in the example. `factors` have the rules of the ops.
    """

    def __init__(self, factors: FactorMap, size_of: Callable[[meta.Size], int] = meta.hint) -> None:
        self._factors, self._size_of = factors, size_of
        self._known: dict[str, int] = {}

    def flops(self, node: fx.Node) -> int:
        """Return the FLOPs of an op node; 0 for one that cannot run without data."""
        args, kwargs = tree_map(self._meta_argument, (node.args, node.kwargs))
        key = f"{node.target} {tree_map(_description, (args, kwargs))}"
        if key not in self._known:
            self._known[key] = _count(node.target, args, kwargs)
        return self._known[key]

    def by_rule(self, node: fx.Node) -> float:
        """Return the FLOPs of products that an op's rule says it sums; 0 where it does not say: torch may know more."""
        return 2.0 * contracted_size(node, self._factors) * sum(_numel(one, self._size_of) for one in _tensors(node))

    def _meta_argument(self, argument: Any) -> Any:
        return tree_map(self._without_symbols, meta.value(argument)) if isinstance(argument, fx.Node) else argument

    def _without_symbols(self, value: Any) -> Any:
        match value:
            case torch.Tensor():
                sizes = [_counted_as(self._size_of(size)) for size in value.shape]
                return torch.empty(sizes, dtype=value.dtype, device="meta")
            case torch.SymInt():
                return _counted_as(self._size_of(value))
            case _:
                return value


def _description(argument: Any) -> Any:
    return (tuple(argument.shape), argument.dtype) if isinstance(argument, torch.Tensor) else argument


def _count(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    placed = {**kwargs, "device": "meta"} if "device" in kwargs else dict(kwargs)
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            target(*args, **placed)
    except (RuntimeError, NotImplementedError):
        return 0  # an op whose result depends on data, or without a meta kernel, is no product
    return int(counter.get_total_flops())


SizeOf = Callable[[meta.Size], int]


def program_costs(
    program: Program,
    *,
    rows: int | None = None,
    shares: WorkShares | None = None,
    memory: bool = True,
    negligible_bytes: float = 0.0,
    sizes: Mapping[sympy.Symbol, int] | None = None,
) -> ProgramCosts:
    """Return the costs of a step of a captured program.

    Args:
        program: its example batch gives the sequence length that the costs are for, where `sizes` says no other.
        rows: rows of a step over all replicas; None: as many as the example has.
        shares: what a tensor parallel group shares; None: what it would choose.
        memory: find out what parts hold by running them without data, whether a sequence can be shared, and what groups
            of more devices share than what they cut has parts, which takes a while; only planning needs it.
        negligible_bytes: what parts hold is assumed where one device needs less than this for all of them: to find it
            out takes most of the time.
        sizes: what the graph's symbols stand for, instead of the example's sizes; what parts hold is told for those
            alone.
    """
    assert not (memory and sizes), "what parts hold is known at the example's sizes"
    own = shares or program.work_shares()
    counted = partial(_counted, program, rows=rows, memory=memory, negligible_bytes=negligible_bytes, sizes=sizes)
    costs = counted(own)
    wide = program.wide_work_shares(own.asked) if memory and _is_of(own, program) else None
    if wide is None:
        return costs
    return replace(costs, wide=counted(wide))


def _is_of(shares: WorkShares, program: Program) -> bool:
    """Tell whether groups would share that, not something of the caller's own."""
    return shares.classes == (program.work_shares(shares.asked) if shares.asked else program.work_shares()).classes


def _counted(
    program: Program,
    shares: WorkShares,
    *,
    rows: int | None,
    memory: bool,
    negligible_bytes: float,
    sizes: Mapping[sympy.Symbol, int] | None,
) -> ProgramCosts:
    graph = program.graph
    profile = _Profile(program, shares, partial(meta.evaluate_size, sizes or {}))
    at_rows = partial(meta.evaluate_size, {**(sizes or {}), **sizes_for_rows(graph, rows or profile.example_rows)})
    summed = [value_bytes(node, at_rows) for node in program.summed_over_rows]
    for node in graph.graph.nodes:
        if node.op == "call_function":
            profile.add_op(node)
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        profile.add_parameter(leaf.node)
    count, of_rows = graph.num_blocks, rows or profile.example_rows
    parts = [part.costs() for part in profile.parts]
    is_negligible = _most_bytes(parts, of_rows) < negligible_bytes
    return ProgramCosts(
        rows=of_rows,
        before=parts[0],
        blocks=tuple(parts[1 : count + 1]),
        after=parts[-1],
        boundary_bytes=tuple(profile.boundary_bytes(block) for block in range(count - 1)),
        units=profile.shares.units,
        repeated_parts=shares.parts,
        memory=profile.memory() if memory and not is_negligible else None,
        tied=tuple(profile.tied),
        row_sums=RowSums(len(summed), float(sum(summed))),
        gathered_work=_gathered_work(program, at_rows, shares),
        sequence_units=program.sequence_units if memory else 1,
        head_units=program.head_units if memory else 1,
    )


def _most_bytes(parts: Iterable[PartCosts], rows: int) -> float:
    """Return more than one device needs for all parts: what is kept of parameters, and all that ops read and make."""
    made = sum(part.traffic_bytes + part.activation_bytes for part in parts)
    return _COPIES * (sum(part.parameter_bytes for part in parts) + rows * made)


def _gathered_work(program: Program, size_of: SizeOf, shares: WorkShares) -> PartCosts:
    """Return what every one of several replicas does of all rows, per row."""
    axis = program.batch_axis
    found = [] if axis is None else RowMeetings(program.graph, axis).found
    nodes = [node for one in found for node in one.work]
    return count_work(program, nodes, size_of, shares).work if nodes else NO_COSTS


def sizes_for_rows(graph: Graph, rows: int) -> dict[sympy.Symbol, int]:
    """Return what the symbols of a graph that count rows stand for where there are so many, over all replicas."""
    return {symbol: rows for symbol in (graph.batch_symbol, graph.all_rows) if symbol is not None}


def example_rows(graph: Graph, size_of: SizeOf = meta.hint) -> int:
    """Return the number of rows of the example batch, or of the batch whose sizes are given."""
    tensors = [leaf.node for leaf in graph.leaves_of(LeafKind.INPUT) if meta.is_tensor(leaf.node)]
    sizes = [size for node in tensors for size in meta.shape(node)]
    of_batch = [size for size in sizes if meta.depends_on_batch(size, graph)]
    return size_of((of_batch or sizes or [1])[0])


class AnalysedNodes(Protocol):
    """A graph of which it is known what its ops do to classes, and what its values depend on."""

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def factors(self) -> FactorMap:
        """Its factor classes."""

    @property
    def flow(self) -> Flow:
        """What its values depend on."""


def count_work(
    analysed: AnalysedNodes, nodes: Iterable[fx.Node], size_of: SizeOf, shares: WorkShares | None = None
) -> PartCosts:
    """Return what some ops cost per row; without `shares`, if every device of a group runs them whole."""
    profile = _Profile(analysed, shares or WorkShares(analysed.factors, frozenset()), size_of)
    for node in nodes:
        profile.add_op(node)
    return reduce(add, (part.costs() for part in profile.parts))


@dataclass(slots=True)
class _Part:
    """Running totals of one part, under the names of `PartCosts`."""

    totals: dict[str, float] = field(default_factory=lambda: {f.name: 0.0 for f in fields(PartCosts)})

    def add(self, name: str, amount: float, is_cut: bool = False, in_sequence: bool = False) -> None:
        """Add to a total, and to its share that is cut, always or where the sequence is shared."""
        self.totals[name] += amount
        if is_cut:
            self.totals[f"split_{name}"] += amount
        elif in_sequence:
            self.totals[f"sequence_{name}"] += amount

    def costs(self) -> PartCosts:
        """Return the totals as costs."""
        counts = {name: int(total) for name, total in self.totals.items() if name.startswith("num_")}
        return PartCosts(**{**self.totals, **counts})  # type: ignore[arg-type]


class _Profile:
    """The totals of all parts while the graph is walked: before, each block, after."""

    def __init__(self, program: AnalysedNodes, shares: WorkShares, size_of: SizeOf) -> None:
        graph, self._flow = program.graph, program.flow
        self.shares, self._size_of, self.example_rows = shares, size_of, example_rows(graph, size_of)
        self.parts = [_Part() for _ in range(graph.num_blocks + 2)]
        self._graph, self._counter = graph, FlopCounter(shares.factors, size_of)
        inputs = {leaf.node for leaf in graph.leaves_of(LeafKind.INPUT)}
        self._parameters = {leaf.node for leaf in graph.leaves_of(LeafKind.PARAMETER)}
        by_batch, by_weights = descendants(graph, inputs), descendants(graph, self._parameters)
        self._of_batch, self._mixed = by_batch, by_batch & by_weights
        self.tied: list[TiedParameter] = []
        self._kept: set[fx.Node] = set()
        self._gathered: set[fx.Node] = set()

    def part_of(self, node: fx.Node) -> int:
        """Return the index of a node's part: 0 before the blocks, k + 1 in block k, the last after them."""
        position, count = self._graph.position(node), self._graph.num_blocks
        is_after = position == count - 1 and self._graph.block_of(node) is None
        return count + 1 if is_after and count else position + 1

    def add_op(self, node: fx.Node) -> None:
        """Count an op."""
        if not meta.has_tensor(node) or not isinstance(node.target, OpOverload):
            return  # getitem and arithmetic of sizes
        part, inside = self.parts[self.part_of(node)], self._inside(node)
        part.add("num_ops", 1 if inside is None else self._calls(node) * inside.num_ops)
        if node not in self._of_batch:
            return
        flops, is_cut = self._flops(node), self.shares.shares_work(node)
        rows = self.example_rows * (self.shares.parts if self.shares.repeats_work(node) else 1)
        part.add("flops", flops / rows, is_cut)
        if flops and not multiplies_weights(node, self.shares.factors, self._flow):
            part.add("attention_flops", flops / rows, is_cut)
        if flops:
            self._keep([node, *node.all_input_nodes])
        part.add("traffic_bytes", self._traffic_bytes(node, flops) / rows, is_cut, self.shares.shares_sequence(node))
        for source in self.shares.gathered(node):
            if source in self._gathered or source not in self._mixed:
                continue
            self._gathered.add(source)
            part.add("gathered_bytes", self._held_bytes(source) / self.example_rows)
            part.add("num_gathers", 1)
        for value in self.shares.exchanged(node):
            part.add("heads_bytes", self._held_bytes(value) / self.example_rows)
            part.add("num_head_exchanges", 1)
        if self.shares.sums(node):
            part.add("reduced_bytes", self._held_bytes(node) / self.example_rows)
            part.add("num_reductions", 1)
            self._add_product_with_sum(node, part)
        if self.shares.returns(node):
            # what reads a value gives its cotangent back
            reader = self.parts[min(map(self.part_of, self._mixed & node.users.keys()), default=0)]
            reader.add("returned_bytes", self._held_bytes(node) / self.example_rows)
            reader.add("num_returns", 1)
            self._add_products_beside(node, reader)

    def _add_product_with_sum(self, node: fx.Node, part: _Part) -> None:
        """Count a product whose result is summed."""
        if multiplies_weights(node, self.shares.factors, self._flow):
            part.add("summed_flops", self._flops(node) / self.example_rows)
            part.add("summed_bytes", self._held_bytes(node) / self.example_rows)
            part.add("num_summed", 1)

    def _add_products_beside(self, node: fx.Node, reader: _Part) -> None:
        """Count the products that read a value whose cotangent is summed, if no other op makes summands of that."""
        users = [user for user in node.users if user in self._mixed and self.shares.shares_work(user)]
        if users and all(multiplies_weights(user, self.shares.factors, self._flow) for user in users):
            reader.add("beside_flops", sum(map(self._flops, users)) / self.example_rows)
            reader.add("beside_bytes", self._held_bytes(node) / self.example_rows)
            reader.add("num_beside", 1)

    def _inside(self, node: fx.Node) -> LeafWork | None:
        """Return what is done in the call of a leaf; None of other ops."""
        return leaf_work(node, self._size_of) if node.target is LEAF else None

    def _calls(self, node: fx.Node) -> float:
        """Return how often an op's forward counts, which a leaf's backward does once more."""
        return LEAF_CALLS if node.target is LEAF and node in self._flow.differentiable else 1

    def _traffic_bytes(self, node: fx.Node, flops: float) -> float:
        """Return the bytes that an op moves which is no product, or that ops in a leaf move which are none."""
        inside = self._inside(node)
        if inside is not None:
            return self._calls(node) * inside.traffic_bytes
        moves = not flops and not is_view(node)
        return sum(map(self.bytes_of, (node, *node.all_input_nodes))) if moves else 0

    def _flops(self, node: fx.Node) -> float:
        """Return torch's count; for an op that torch has no formula for, what its rule says of products."""
        return self._calls(node) * self._counter.flops(node) or self._counter.by_rule(node)

    def _keep(self, nodes: Iterable[fx.Node]) -> None:
        """Count values as kept for the backward: once for all views of it, and not what no gradient needs."""
        for node in nodes:
            base = _base(node)
            if base not in self._kept and base in self._of_batch and _is_float(base):
                self._kept.add(base)
                part = self.parts[self.part_of(base)]
                is_cut = meta.is_tensor(base) and self.shares.splits(base)
                size, shared = self._held_bytes(base) / self.example_rows, self.shares.shares_sequence(base)
                part.add("activation_bytes", size, is_cut, shared)

    def add_parameter(self, node: fx.Node) -> None:
        """Count a parameter where it is read first, and note where it is read again."""
        size, is_split = self._held_bytes(node), self.shares.splits(node)
        readers = sorted({self.part_of(user) for user in node.users if user.op == "call_function"})
        part = self.parts[readers[0] if readers else 0]
        part.add("parameter_bytes", size, is_split)
        if self.shares.repeats(node):
            part.add("repeated_parameter_bytes", size)
            part.add("late_parameter_bytes", size if node in self.shares.added_late else 0)
        if len(readers) > 1:
            self.tied.append(TiedParameter(size, size if is_split else 0, tuple(readers)))

    def memory(self) -> ProgramMemory | None:
        """Return what the parts hold; None where only the values of a batch tell."""
        part_of = owners(self._graph, self._mixed, self.part_of)
        return program_memory(self._graph, self.shares, part_of, len(self.parts), self.example_rows, self._flow)

    def boundary_bytes(self, block: int) -> float:
        """Return the bytes per row that cross from a block (and all before it) to the next ones."""
        crossing = (n for n in self._mixed if self.part_of(n) <= block + 1 and self._last_use(n) > block + 1)
        return sum(self.bytes_of(node) for node in crossing) / self.example_rows

    def _held_bytes(self, node: fx.Node) -> float:
        """Return the bytes of a value, or of the part of it that several devices hold each.

        Several values of one op are whole (their getitem nodes are views of them).
        """
        is_repeated = meta.is_tensor(node) and self.shares.repeats(node)
        return self.bytes_of(node) / (self.shares.parts if is_repeated else 1)

    def bytes_of(self, node: fx.Node) -> int:
        """Return the bytes of a value."""
        return value_bytes(node, self._size_of)

    def _last_use(self, node: fx.Node) -> int:
        return max((self.part_of(user) for user in node.users if user in self._mixed), default=0)


def value_bytes(node: fx.Node, size_of: SizeOf = meta.hint) -> int:
    """Return the bytes of a node's value, of all of its tensors; 0 of what has none."""
    return sum(_numel(tensor, size_of) * tensor.element_size() for tensor in _tensors(node))


def _numel(tensor: torch.Tensor, size_of: SizeOf) -> int:
    sizes = map(size_of, tensor.shape)
    return math.prod(map(_counted_as, sizes))


def _counted_as(size: int) -> int:
    """Return a size, 1 for one that only the values of a batch tell, which nobody knows."""
    return 1 if size == meta.DATA_DEPENDENT else size


def owners(graph: Graph, mixed: Collection[fx.Node], part_of: Callable[[fx.Node], int]) -> dict[fx.Node, int]:
    """Return the part that every node's value belongs to, by number.

    What batch or parameters alone reach is computed where it is read: it belongs to the part that reads it, and where
    several do to EVERYWHERE, as each stage then has one.

    Args:
        graph: the program.
        mixed: nodes that both batch and parameters reach.
        part_of: the number of such a node's part.
    """
    readers: dict[fx.Node, set[int]] = {}
    for node in reversed(graph.graph.nodes):
        users = (readers[user] for user in node.users)
        readers[node] = {part_of(node)} if node in mixed or node.op == "output" else set[int]().union(*users)
    return {node: next(iter(parts)) if len(parts) == 1 else EVERYWHERE for node, parts in readers.items()}


def _base(node: fx.Node) -> fx.Node:
    """Return the node whose storage the value shares."""
    while node.op == "call_function" and is_view(node):
        sources = [source for source in node.all_input_nodes if meta.has_tensor(source)]
        if not sources:
            break
        node = sources[0]
    return node


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    if not meta.has_value(node):
        return []
    return [item for item in tree_leaves(meta.value(node)) if isinstance(item, torch.Tensor)]


def _is_float(node: fx.Node) -> bool:
    return any(carries_gradient(tensor.dtype) for tensor in _tensors(node))
