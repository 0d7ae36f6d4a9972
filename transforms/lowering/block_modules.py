"""Make the repeated blocks of a device's module modules of their own, one for all that do the same.

A compiler takes as long for a graph as it has ops, and the blocks of a model are alike: each that is alike is compiled
once, and called with the parameters of every block that it stands for. So is what other plans and other ranks of this
process run, where it is alike. What stands before, between and after blocks is cut out likewise. Besides, gradients of
a block are there when its backward is done, not at the end of the whole one.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from torch import fx, nn

from hetu_fx.graph import meta
from hetu_fx.graph.blocks import block_index
from hetu_fx.graph.leaves.leaf_ops import LEAF
from hetu_fx.transforms.lowering.recomputing_module import CheckpointedRun
from hetu_fx.transforms.rewrites.counter_rng import DROPOUT, UNIFORM

SITES = {DROPOUT: 3, UNIFORM: 2, LEAF: 3}
"""Which argument of an op that draws tells it from others that do the same: a number that each call is given."""

_known: WeakValueDictionary[Hashable, BlockModule] = WeakValueDictionary()


class BlockModule(fx.GraphModule):
    """Some ops of a device's graph: a function of what they read, parameters among it, that others share.

    `compiled` is what it was compiled to, by what compiles.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, graph)
        self.compiled: dict[Hashable, Any] = {}


@dataclass(frozen=True)
class BlockModules:
    """Cut a device's module at its blocks.

    Requires: what `Checkpoint` makes. `units` are those of what the module is given, in order, None for what is in
        none: where there are no blocks, the module is cut where those of a unit are read first.
    Ensures: the module does the same in the same order, by calls of `BlockModule`s, of which there is one for all ops
        that are alike: the same ops with the same arguments, whatever sizes and numbers their inputs have.

        %a = aten.relu(aten.linear(%x, %w_0))     ->      %piece = call_module[piece_0](%x, %w_0)
        %b = aten.relu(aten.linear(%a, %w_1))             %a = getitem(%piece, 0)
                                                          %piece_1 = call_module[piece_0](%a, %w_1)
    """

    paths: tuple[str, ...]
    units: tuple[int | None, ...] = ()
    name: ClassVar[str] = "block_modules"

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        if not self.paths and not self.units:
            return module
        outer, values, modules = fx.Graph(), dict[fx.Node, fx.Node](), nn.Module()
        names: dict[BlockModule, str] = {}
        for span in _spans(module, self._blocks(module)):
            if span[0].op in ("placeholder", "output"):
                values |= {node: outer.node_copy(node, values.__getitem__) for node in span}
                continue
            piece = _Piece.of(span, module)
            block = piece.module()
            name = names.setdefault(block, f"piece_{len(names)}")
            modules.add_module(name, block)
            made = outer.call_module(name, (*(values[node] for node in piece.inputs), *piece.sites))
            values |= {n: outer.call_function(operator.getitem, (made, i)) for i, n in enumerate(piece.results)}
        return fx.GraphModule(modules, outer)

    def _blocks(self, module: fx.GraphModule) -> list[int | None]:
        """Return with which block each node goes; what has no block amid one goes with that."""
        if self.paths:
            return fill_gaps([_block(node, module, self.paths) for node in module.graph.nodes])
        return list(_by_units(module, self.units))


def _by_units(module: fx.GraphModule, units: Sequence[int | None]) -> Iterator[int]:
    """Yield the last unit that has been read so far."""
    unit_of = dict(zip(module.graph.find_nodes(op="placeholder"), units, strict=True))
    last = 0
    for node in module.graph.nodes:
        last = max([last, *(unit for given in node.all_input_nodes if (unit := unit_of.get(given)) is not None)])
        yield _OUTSIDE if node.op in ("placeholder", "output") else last


def _spans(module: fx.GraphModule, blocks: Sequence[int | None]) -> Iterator[list[fx.Node]]:
    """Yield the nodes of a module, in order, block by block."""
    nodes = list(module.graph.nodes)
    for _, pairs in groupby(zip(nodes, blocks, strict=True), key=operator.itemgetter(1)):
        yield [node for node, _ in pairs]


_OUTSIDE = -1
"""The block of what a graph is given and what it makes, which is none."""


def _block(node: fx.Node, module: fx.GraphModule, paths: Sequence[str]) -> int | None:
    if node.op in ("placeholder", "output"):
        return _OUTSIDE
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _block(node.args[0], module, paths)
    if isinstance(run := _run_of(node, module), CheckpointedRun):
        node = next(inner for inner in run.body.graph.nodes if inner.op == "call_function")
    return block_index(meta.module_stack(node), paths)


def _run_of(node: fx.Node, module: fx.GraphModule) -> nn.Module | None:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def fill_gaps(blocks: Sequence[int | None]) -> list[int | None]:
    """Return blocks with those of ops that have none, but stand between two of one block."""
    found = list(blocks)
    last: int | None = None
    for i, block in enumerate(blocks):
        if block is None or block == _OUTSIDE:
            continue
        if last is not None and blocks[last] == block:
            found[last:i] = [block] * (i - last)
        last = i
    return found


@dataclass(frozen=True)
class _Piece:
    """Ops that stand one after another.

    Attributes:
        span: the ops.
        runs: of those that call a module, what that is.
        inputs: nodes before them that they read, in that order.
        results: those of them that others read.
        sites: of those that draw, in order, by what number they are told apart.
    """

    span: Sequence[fx.Node]
    runs: Mapping[fx.Node, nn.Module]
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    sites: tuple[Any, ...]
    _numbers: dict[fx.Node, int] = field(default_factory=dict)

    @classmethod
    def of(cls, span: Sequence[fx.Node], module: fx.GraphModule) -> _Piece:
        """Return what these ops read and make."""
        own = set(span)
        inputs = tuple(dict.fromkeys(n for node in span for n in node.all_input_nodes if n not in own))
        results = tuple(node for node in span if not own.issuperset(node.users))
        sites = tuple(node.args[SITES[node.target]] for node in span if node.target in SITES)
        runs = {node: run for node in span if (run := _run_of(node, module)) is not None}
        numbers = {node: number for number, node in enumerate((*inputs, *span))}
        return cls(span, runs, inputs, results, sites, numbers)

    def module(self) -> BlockModule:
        """Return the module that does this: that of a piece that is alike, if there is one."""
        found = _known.get(self.form)
        if found is None:
            found = _known[self.form] = self._made()
        return found

    @property
    def form(self) -> Hashable:
        """Return all that pieces must have in common to be done by one module; it is compiled for any sizes."""
        return (
            len(self.inputs),
            tuple(self._form_of(node) for node in self.span),
            tuple(self._numbers[node] for node in self.results),
        )

    def _form_of(self, node: fx.Node) -> Hashable:
        args = list(node.args)
        if node.target in SITES:
            args[SITES[node.target]] = None
        target = _run_form(self.runs[node]) if node in self.runs else node.target
        return target, _frozen(args, self._numbers), _frozen(dict(node.kwargs), self._numbers)

    def _made(self) -> BlockModule:
        graph, root = fx.Graph(), nn.Module()
        values = {node: graph.placeholder(f"input_{number}") for number, node in enumerate(self.inputs)}
        sites = iter([graph.placeholder(f"site_{number}") for number in range(len(self.sites))])
        for number, node in enumerate(self.span):
            made = values[node] = graph.node_copy(node, values.__getitem__)
            if node.target in SITES:
                made.update_arg(SITES[node.target], next(sites))
            if node in self.runs:
                made.target = f"run_{number}"
                root.add_module(made.target, self.runs[node])
        graph.output(tuple(values[node] for node in self.results))
        return BlockModule(root, graph)


def _run_form(run: nn.Module) -> Hashable:
    """Return what runs that are recomputed must have in common."""
    if not isinstance(run, CheckpointedRun):
        return id(run)
    nodes = list(run.body.graph.nodes)
    numbers = {node: number for number, node in enumerate(nodes)}
    forms = ((n.op, n.target if callable(n.target) else None, _frozen(n.args, numbers)) for n in nodes)
    return CheckpointedRun, run.ops, tuple(forms)


def _frozen(value: Any, numbers: Mapping[fx.Node, int]) -> Hashable:
    """Return an argument as a value that can be compared, nodes by their numbers."""
    if isinstance(value, fx.Node):
        return fx.Node, numbers[value]
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item, numbers) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item, numbers)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, _frozen((value.start, value.stop, value.step), numbers)
    return type(value), value
