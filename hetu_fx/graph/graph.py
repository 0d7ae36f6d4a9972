"""One single-device program as a plain value.

`Graph.graph` is a flat, functional ATen graph: placeholders (the leaves), then ops, then one output node
with a flat tuple. Passes return new graphs: `clone()`, change the clone's fx graph, `evolve(...)` what else
changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.blocks import block_index
from hetu_fx.graph.containers import Tree, loss_alone, unflatten
from hetu_fx.graph.forward_checks import Check
from hetu_fx.graph.leaves.leaf_call import OpaqueCall
from hetu_fx.graph.row_dims import RowDims


class LeafKind(StrEnum):
    """What a placeholder stands for."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    COUNT = "count"  # a global count of rows or tokens, 0-d, made by the prologue
    RANDOM_STATE = "random_state"  # int64[3]: seed, step, index of the first row in the global batch


class OutputKind(StrEnum):
    """What an output value is for."""

    LOSS = "loss"
    VALUE = "value"
    BUFFER_UPDATE = "buffer_update"
    COUNT = "count"  # a local count, to be summed over micro-batches and replicas
    CHECK = "check"  # more than zero, or true, where the forward raises


@dataclass(frozen=True)
class Leaf:
    """A placeholder and what it stands for.

    `name` is the FQN in the user's model (parameter, buffer, constant), or the input's key: keyword name or
    position, nested ones joined by dots. `aliases` are further FQNs of a tied parameter or buffer. `row_dim` is the dim
    of an input that counts the rows of the batch, if it has one.
    """

    kind: LeafKind
    name: str
    node: fx.Node
    persistent: bool = True
    aliases: tuple[str, ...] = ()
    row_dim: int | None = None

    def __post_init__(self) -> None:
        assert self.row_dim is None or self.kind is LeafKind.INPUT, "only inputs have rows of the batch"


OBSERVED = "observed"
"""How names of outputs begin that are those of submodules."""


@dataclass(frozen=True)
class OutputLeaf:
    """One entry of the flat outputs: its name (for a buffer update: the buffer's FQN) and kind."""

    name: str
    kind: OutputKind


@dataclass(frozen=True)
class FixedRows:
    """The rows of a batch where a graph takes one number of them only.

    Attributes:
        number: how many there are.
        dims: which dim of each input counts them.
    """

    number: int
    dims: RowDims

    def __post_init__(self) -> None:
        assert self.number > 0, "a batch has rows"
        assert self.dims, "some input has them"


@dataclass(frozen=True)
class InputLayout:
    """How inputs must lie in memory, as the forward has asked for it and may have gone on by the answer.

    Attributes:
        line: where it has asked.
        orders: the dims of each input, outermost in memory first.
    """

    line: str
    orders: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured single-device program.

    Attributes:
        graph: flat functional ATen fx graph; placeholders, ops, one output node.
        leaves: what the placeholders are, in their order.
        outputs: what the output node's flat arguments are, in their order.
        input_tree, output_tree: structure of the user's batch and output.
        batch_symbol: the symbol of the batch size, or None if the batch is static (a note says why).
        fixed_rows: where the batch is static, its rows; a `batch_symbol` then stands for those of a replica, which the
            others' are gathered to. None also where no input has rows.
        all_rows: the symbol of the rows that all replicas have together, where some value has them; else None.
        block_paths: FQNs of the repeated blocks, in order of execution.
        constants: values of the CONSTANT leaves by name.
        training: whether the model was in training mode.
        notes: what the user should know about this capture.
        observed: structure of what submodules make that are observed, in outputs whose names begin with OBSERVED; None
            if none are.
        layout: how inputs must lie in memory, where the forward has asked for that; else None.
        conditions: what must hold of the sizes of a batch, as it did of the example's: ops, or the forward itself, have
            compared sizes and gone on by what came out.
        checks: what the forward asks of values and raises by, each with an output of its name: CHECK, or a COUNT.
        leaf_calls: calls of modules that no capture goes into, which ops of the graph make by their names.
        row_dims: which dim of each input counts the rows of the batch; inputs without rows are left out.
    """

    graph: fx.Graph
    leaves: tuple[Leaf, ...]
    outputs: tuple[OutputLeaf, ...]
    input_tree: Tree
    output_tree: Tree
    batch_symbol: sympy.Symbol | None
    training: bool
    block_paths: tuple[str, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fixed_rows: FixedRows | None = None
    all_rows: sympy.Symbol | None = None
    notes: tuple[str, ...] = ()
    observed: Tree | None = None
    layout: InputLayout | None = None
    conditions: tuple[sympy.Expr, ...] = ()
    checks: tuple[Check, ...] = ()
    leaf_calls: tuple[OpaqueCall, ...] = ()
    row_dims: RowDims = field(init=False)
    _loss_tree: Tree = field(init=False, repr=False)
    _leaf_by_node: Mapping[fx.Node, Leaf] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = {leaf.name: leaf.row_dim for leaf in self.leaves if leaf.row_dim is not None}
        by_node = {leaf.node: leaf for leaf in self.leaves}
        loss = next((leaf.name for leaf in self.outputs if leaf.kind is OutputKind.LOSS), "")
        vars(self).update(row_dims=rows, _loss_tree=loss_alone(self.output_tree, loss), _leaf_by_node=by_node)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        assert placeholders == [leaf.node for leaf in self.leaves], "leaves are the placeholders, in order"
        assert len(self.output_values) == len(self.outputs), "one OutputLeaf for each output value"
        sizes = [meta.shape(leaf.node)[leaf.row_dim] for leaf in self.leaves if leaf.row_dim is not None]
        assert all(meta.expression(size) == self.batch_symbol for size in sizes), "rows are as many as the batch has"

    @property
    def output_node(self) -> fx.Node:
        """Return the output node."""
        return self.graph.output_node()

    @property
    def output_values(self) -> tuple[fx.Node, ...]:
        """Return the nodes whose values are the outputs, in the order of `outputs`."""
        return tuple(self.output_node.args[0])  # type: ignore[arg-type]

    @property
    def takes_any_rows(self) -> bool:
        """Tell whether batches may have any number of rows."""
        return self.batch_symbol is not None and self.fixed_rows is None

    @property
    def loss(self) -> fx.Node | None:
        """Return the node of the loss, if the program has one."""
        kinds = [leaf.kind for leaf in self.outputs]
        return self.output_values[kinds.index(OutputKind.LOSS)] if OutputKind.LOSS in kinds else None

    def leaves_of(self, kind: LeafKind) -> tuple[Leaf, ...]:
        """Return the leaves of one kind, in order."""
        return tuple(leaf for leaf in self.leaves if leaf.kind is kind)

    def leaf_of(self, node: fx.Node) -> Leaf:
        """Return the leaf of a placeholder node; KeyError for other nodes."""
        return self._leaf_by_node[node]

    def outputs_of(self, kind: OutputKind) -> tuple[tuple[OutputLeaf, fx.Node], ...]:
        """Return the outputs of one kind with their nodes, in order."""
        pairs = zip(self.outputs, self.output_values, strict=True)
        return tuple((leaf, node) for leaf, node in pairs if leaf.kind is kind)

    def of_observed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what observed submodules have made, by the submodules' names, from output values by name."""
        if self.observed is None:
            return {}
        found: dict[str, Any] = unflatten(self.observed, values)
        return {name.removeprefix(f"{OBSERVED} "): value for name, value in found.items()}

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        """Build the user's output container from output values by name; where the loss is alone, others say so."""
        has_others = any(leaf.name in values for leaf in self.outputs if leaf.kind is OutputKind.VALUE)
        return unflatten(self.output_tree if has_others else self._loss_tree, values)

    @property
    def num_blocks(self) -> int:
        """Return the number of repeated blocks (transformer layers, say); 0 if there are none."""
        return len(self.block_paths)

    def block_of(self, node: fx.Node) -> int | None:
        """Return the index of the block that the node belongs to, or None before, between and after."""
        return block_index(meta.module_stack(node), self.block_paths)

    def position(self, node: fx.Node) -> int:
        """Return the index of the latest block among the node and all it is computed from; -1 if none."""
        return self._positions[node]

    @cached_property
    def _positions(self) -> dict[fx.Node, int]:
        positions: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            own = self.block_of(node)
            inputs = [positions[other] for other in node.all_input_nodes]
            positions[node] = max([-1 if own is None else own, *inputs])
        return positions

    def clone(self) -> Graph:
        """Return a graph that shares no fx node with this one (example values are shared)."""
        fresh = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        result = fresh.graph_copy(self.graph, mapping)
        output = fresh.output(result)
        meta.copy_all_meta(self.output_node, output)
        leaves = tuple(dataclasses.replace(leaf, node=mapping[leaf.node]) for leaf in self.leaves)
        return self.evolve(graph=fresh, leaves=leaves)

    def evolve(self, **changes: Any) -> Graph:
        """Return this value with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def with_note(self, *notes: str) -> Graph:
        """Return this value with notes added, each at most once."""
        new = tuple(note for note in dict.fromkeys(notes) if note not in self.notes)
        return self.evolve(notes=self.notes + new) if new else self

    def module(self) -> fx.GraphModule:
        """Return a module that takes the leaves' values in order and returns the flat outputs."""
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def select(self, keep: Callable[[OutputLeaf], bool]) -> Graph:
        """Return a clone with only the outputs for which `keep` holds; nodes only others need are dropped."""
        fresh = self.clone()
        pairs = [pair for pair in zip(fresh.outputs, fresh.output_values, strict=True) if keep(pair[0])]
        fresh.output_node.args = (tuple(node for _, node in pairs),)
        drop_dead_nodes(fresh.graph)
        return fresh.evolve(outputs=tuple(leaf for leaf, _ in pairs))


def drop_dead_nodes(graph: fx.Graph) -> None:
    """Erase every op without users; placeholders stay. All ops of a functional graph are pure."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)
