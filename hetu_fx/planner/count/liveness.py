"""What a program holds in memory, found by running it forward and backward on tensors without data.

Autograd decides what is saved, so nothing is assumed about any op: every storage that an op allocates is seen, and
seen to go when its last tensor goes. Two runs, of the example's rows and of twice as many, tell what grows with the
rows. Parameters, their gradients, inputs and constants are left out. Every part makes its own gradient of a parameter
that several read, as parts in different stages do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.torch_private import FakeTensorMode, tree_leaves
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind
from hetu_fx.planner.count.peaks import Held, OpStorages, Owner, RecomputeSegments, Run, Sharing, all_pieces
from hetu_fx.planner.count.storages import Storages
from hetu_fx.planner.values.footprint import PartMemory, ProgramMemory, RecomputeMemory, Segment
from hetu_fx.planner.values.line import Amount
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.work_shares import WorkShares


def program_memory(
    graph: Graph, shares: WorkShares, part_of: Mapping[fx.Node, int], num_parts: int, rows: int, flow: Flow
) -> ProgramMemory | None:
    """Return what each part of a program holds; None for one that cannot run without data.

    Args:
        graph: the program.
        shares: what a tensor parallel group shares.
        part_of: see `owners`.
        num_parts: how many parts there are.
        rows: of the example batch.
        flow: what values depend on.
    """
    runner, grows = _Runner(graph, shares, part_of), graph.takes_any_rows
    try:
        first = runner.run(rows)
        second = runner.run(2 * rows) if grows else first
    except (RuntimeError, NotImplementedError):
        return None  # an op whose result depends on data, or that cannot run without
    measured = _Measured(first, second, rows, grows, shares.parts)
    again = _again(all_pieces(graph, shares, part_of, flow), graph.num_blocks, measured) if graph.num_blocks else []
    largest = _largest(graph, shares, part_of)
    (parts, everywhere), (more_parts, more_everywhere) = (run.peaks(num_parts) for run in (first, second))
    found = [
        PartMemory(*(*measured.amounts(one, other), largest.get(number, Amount())))
        for number, (one, other) in enumerate(zip(parts, more_parts, strict=True))
    ]
    found[1:-1] = [replace(part, again=each) for part, each in zip(found[1:-1], again, strict=True)]
    return ProgramMemory(tuple(found), *measured.amounts([everywhere], [more_everywhere]))


def _again(pieces: Mapping[str, RecomputeSegments], num_blocks: int, measured: _Measured) -> list[RecomputeMemory]:
    """Return what each block is where it is computed again."""
    ways = {way: measured.pieces(found, num_blocks) for way, found in pieces.items()}
    return [RecomputeMemory(**{way: blocks[number] for way, blocks in ways.items()}) for number in range(num_blocks)]


def _largest(graph: Graph, shares: WorkShares, part_of: Mapping[fx.Node, int]) -> dict[int, Amount]:
    """Return the largest parameter that each part reads."""
    found: dict[int, Amount] = {}
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        size = (
            meta.numel(leaf.node) * meta.dtype(leaf.node).itemsize / (shares.parts if shares.repeats(leaf.node) else 1)
        )
        for part in {max(0, part_of[user]) for user in leaf.node.users}:
            if size > found.get(part, Amount()).fixed:
                found[part] = Amount(fixed=size, split_fixed=size if shares.splits(leaf.node) else 0)
    return found


@dataclass(frozen=True, slots=True)
class _Measured:
    """Runs of `rows` rows and of twice as many; where rows are fixed, one run, from which lines go through zero.

    `parts` are those of which several devices hold the same one.
    """

    first: Run
    second: Run
    rows: int
    grows: bool
    parts: int = 1

    def amounts(self, one: Iterable[Held], other: Iterable[Held]) -> Iterator[Amount]:
        """Yield the line through each two measurements."""
        return map(self._amount, one, other)

    def pieces(self, pieces: RecomputeSegments, num_blocks: int) -> list[tuple[Segment, ...]]:
        """Return what the pieces of each block are."""
        found = zip(*(pieces.peaks(run, num_blocks + 2)[1:-1] for run in (self.first, self.second)), strict=True)
        return [tuple(Segment(*self.amounts(*pair)) for pair in zip(*blocks, strict=True)) for blocks in found]

    def _amount(self, first: Held, second: Held) -> Amount:
        more = second - first if self.grows else first
        per_row = self._held(more) / self.rows, more.split / self.rows, more.sequence / self.rows
        rest = first - more
        return Amount(self._held(rest), per_row[0], rest.split, per_row[1], rest.sequence, per_row[2])

    def _held(self, held: Held) -> float:
        """Return the bytes, of what several devices hold the same part of those of a part."""
        return held.whole - held.repeated * (1 - 1 / self.parts)


class _Runner:
    """Runs a program's loss forward and backward without data, and writes down what is allocated and freed."""

    def __init__(self, graph: Graph, shares: WorkShares, part_of: Mapping[fx.Node, int]) -> None:
        self._names = {node.name: node for node in graph.graph.nodes}
        self._graph = graph.select(lambda leaf: graph.loss is None or leaf.kind is OutputKind.LOSS)
        self._shares, self._part_of = shares, part_of

    def run(self, rows: int) -> Run:
        """Run with so many rows; leaves are left out of what came and went."""
        storages: Storages[Owner] = Storages(Owner(0))
        with FakeTensorMode():
            leaves = [self._leaf(leaf.node, leaf.kind is LeafKind.PARAMETER, rows) for leaf in self._graph.leaves]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            storages.ignore(tensors)
            with storages:
                walk = _LivenessWalk(self._graph.module(), self, storages)
                with saved_tensors_hooks(walk.saves, lambda tensor: tensor):
                    roots = [root for root in tree_leaves(walk.run(*leaves)) if root.requires_grad]
                parameters, results, saving = [*tensors, *walk.own.values()], walk.results, frozenset(walk.saving)
                del walk
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            gradients = storages.numbers(leaf.grad for leaf in parameters if leaf.grad is not None)
        return Run(storages.changes(), gradients, results, saving)

    def _leaf(self, node: fx.Node, is_parameter: bool, rows: int) -> Any:
        example = meta.value(self._names[node.name])
        if not isinstance(example, Tensor):
            return meta.hint(example)
        sizes = [self._size(size, rows) for size in example.shape]
        is_trained = is_parameter and carries_gradient(example.dtype)
        return torch.empty(sizes, dtype=example.dtype, device=example.device, requires_grad=is_trained)

    def _size(self, size: meta.Size, rows: int) -> int:
        symbol, expression = self._graph.batch_symbol, meta.expression(size)
        if symbol is None or isinstance(size, int) or expression.free_symbols != {symbol}:
            return meta.hint(size)
        return int(expression.subs(symbol, rows))

    def part_of(self, clone: fx.Node) -> int:
        """Return the part that a node's value belongs to."""
        return self._part_of[self._names[clone.name]]

    def owner(self, clone: fx.Node, sizes: Mapping[int, Sharing], *, is_backward: bool) -> Owner:
        return Owner(self.part_of(clone), is_backward, self._sharing(self._names[clone.name]), sizes, clone.name)

    def sizes(self, values: Mapping[fx.Node, Any]) -> dict[int, Sharing]:
        """Return for the sizes of these values how a group shares a storage of that size.

        What an op saves, and the gradients that its backward makes, are as large as one of them.
        """
        sizes: dict[int, Sharing] = {}
        for node, value in values.items():
            if isinstance(value, Tensor):
                size, sharing = _bytes(value), self._sharing(self._names[node.name])
                sizes[size] = max(sizes.get(size, Sharing.NEVER), sharing)
        return sizes

    def _sharing(self, node: fx.Node) -> Sharing:
        if meta.is_tensor(node) and self._shares.splits(node):
            return Sharing.ALWAYS
        if meta.is_tensor(node) and self._shares.repeats(node):
            return Sharing.REPEATED
        return Sharing.IN_SEQUENCE if self._shares.shares_sequence(node) else Sharing.NEVER


class _LivenessWalk(fx.Interpreter):
    """Runs a graph node by node, and says whose turn it is, forward and backward.

    `own` are the parameters by (placeholder, part that reads it): the same memory, with a gradient for each part.
    `results` and `saving` are those of a `Run`.
    """

    def __init__(self, module: fx.GraphModule, runner: _Runner, storages: Storages[Owner]) -> None:
        super().__init__(module)
        self._about, self._storages = runner, storages
        self.own: dict[tuple[fx.Node, int], Tensor] = {}
        self.results: dict[str, OpStorages] = {}
        self.saving: set[str] = set()

    def saves(self, tensor: Tensor) -> Tensor:
        """Write down that the op at hand saves something for its backward."""
        self.saving.add(self._storages.owner.op)
        return tensor

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Return the values of nodes that a node reads, with its part's own parameters."""
        return fx.node.map_arg(args, lambda node: self._own(node, n))

    def _own(self, node: fx.Node, reader: fx.Node) -> Any:
        value = self.env[node]
        if node.op != "placeholder" or not isinstance(value, Tensor) or not value.requires_grad:
            return value
        key = node, self._about.part_of(reader)
        if key not in self.own:
            self.own[key] = value.detach().requires_grad_()
        return self.own[key]

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and let its gradient functions say when their turn has come."""
        if n.op != "call_function":
            return super().run_node(n)
        storages, about = self._storages, self._about
        sizes = about.sizes({operand: self.env[operand] for operand in n.all_input_nodes})
        backward = about.owner(n, dict(sizes), is_backward=True)
        storages.owner = about.owner(n, sizes, is_backward=False)
        result = super().run_node(n)
        sizes.update(about.sizes({n: result}))

        def takes_over(*_: object) -> None:
            storages.owner = backward

        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        for tensor in made:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(takes_over)
        self.results[n.name] = OpStorages(storages.numbers(made), sum(map(_bytes, made)))
        return result


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
