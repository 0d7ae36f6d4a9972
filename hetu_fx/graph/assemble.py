"""Turn what torch.export gives into a Graph: flat, functional, clean, with the user's names.

Buffers that a forward assigns anew (`self.mean = 0.9 * self.mean + ...`): to a trace, writes to those there are.
torch.export follows assignments to buffers of its root module alone, which the user's model is not: on others, what is
assigned would be lost without a word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from hetu_fx.base.dtypes import carries_gradient, is_real
from hetu_fx.base.torch_private import buffer_slots, rename
from hetu_fx.errors import BatchError, CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.blocks import find_blocks
from hetu_fx.graph.capture_failure import WAY_OUT
from hetu_fx.graph.containers import (
    LOSS,
    Constant,
    Opaque,
    TensorSlot,
    Tree,
    WithheldNumber,
    loss_among,
    walk,
    without_opaque,
)
from hetu_fx.graph.example import Example, order_in_memory
from hetu_fx.graph.forward_checks import Check
from hetu_fx.graph.functional import functionalize
from hetu_fx.graph.graph import FixedRows, Graph, InputLayout, Leaf, LeafKind, OutputKind, OutputLeaf
from hetu_fx.graph.leaves.leaf_call import OpaqueCall
from hetu_fx.graph.numbers import settled_numbers
from hetu_fx.graph.regions import detach_at_exits, gradient_carriers, inline_regions
from hetu_fx.graph.row_dims import AskedRowDims
from hetu_fx.graph.simplify import clean, name_masks, remove_detached

_WAY_OUT = (
    "hint: register the buffer before, in its final shape and dtype, and write to it (buffer.copy_(...)), or return "
    "the value"
)


@dataclass(frozen=True, eq=False)
class _Slot:
    """A place for a buffer in a module, by the name that it has in the model."""

    buffers: dict[str, Tensor | None]
    name: str
    path: str
    buffer: Tensor | None

    @property
    def key(self) -> tuple[int, str]:
        """Return what tells it from others: a trace has several objects for a module, with the module's buffers."""
        return id(self.buffers), self.name

    @property
    def now(self) -> Tensor | None:
        """Return what stands there now."""
        return self.buffers.get(self.name)


Ties = Collection[frozenset[str]]
"""Names of buffers that are one."""


def tied_buffers(model: nn.Module) -> Ties:
    """Return which names of a model's buffers stand for one; while it is traced, each has a tensor of its own."""
    names: dict[int, set[str]] = {}
    for slot in _slots(model):
        names.setdefault(id(slot.buffer), set()).add(slot.path)
    return [frozenset(found) for found in names.values() if len(found) > 1]


@contextmanager
def written_back(model: nn.Module, ties: Ties) -> Iterator[None]:
    """Write what is assigned to buffers inside to the buffers that stood there, which stay the model's.

    Args:
        model: the model that is traced.
        ties: as `tied_buffers` tells before that.

    Raises:
        CaptureError: a buffer is new, gone, or of another shape or dtype; one of several names has become another.
    """
    before = _slots(model)
    yield
    _check_none_is_new(model, before)
    changed = [slot for slot in before if slot.now is not slot.buffer]
    for slot in changed:
        _check(slot)
    _check_ties({slot.path: slot.now for slot in changed}, ties)
    for slot in changed:
        assert slot.buffer is not None, "it has been checked"
        assigned, slot.buffers[slot.name] = slot.now, slot.buffer
        assert assigned is not None, "it has been checked"
        slot.buffer.copy_(assigned.detach())


def _slots(model: nn.Module) -> list[_Slot]:
    """Return each place for a buffer once, by the first of its module's names."""
    found: dict[tuple[int, str], _Slot] = {}
    for path, module in model.named_modules():
        buffers = buffer_slots(module)
        for name, buffer in buffers.items():
            slot = _Slot(buffers, name, f"{path}.{name}" if path else name, buffer)
            found.setdefault(slot.key, slot)
    return list(found.values())


def _check_none_is_new(model: nn.Module, before: list[_Slot]) -> None:
    known = {slot.key for slot in before}
    new = [slot.path for slot in _slots(model) if slot.key not in known]
    if new:
        raise CaptureError(f"forward registers the buffers {new}, which a graph cannot keep\n{_WAY_OUT}")


def _check(slot: _Slot) -> None:
    """Refuse what cannot be written to the buffer that stood in a slot."""
    old, new = slot.buffer, slot.now
    if old is None or new is None:
        raise CaptureError(
            f"forward {'makes' if old is None else 'takes away'} the buffer {slot.path!r}, and is another one with it "
            f"than without\n{_WAY_OUT}"
        )
    if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        forms = (f"{one.dtype} {list(one.shape)} on {one.device}" for one in (old, new))
        raise CaptureError(f"forward makes the buffer {slot.path!r}, {' into '.join(forms)}\n{_WAY_OUT}")


def _check_ties(assigned: Mapping[str, Tensor | None], ties: Ties) -> None:
    """Refuse that one of several names of a buffer becomes another, and others do not."""
    for path, new in assigned.items():
        names = next((names for names in ties if path in names), ())
        others = sorted(name for name in names if assigned.get(name) is not new)
        if others:
            raise CaptureError(f"forward assigns {path!r}, but {others} stay what both were\n{_WAY_OUT}")


MODEL_PREFIX = "model."
LEAF_KINDS = {
    InputKind.PARAMETER: LeafKind.PARAMETER,
    InputKind.BUFFER: LeafKind.BUFFER,
    InputKind.CONSTANT_TENSOR: LeafKind.CONSTANT,
    InputKind.USER_INPUT: LeafKind.INPUT,
}


@dataclass(frozen=True)
class Assembly:
    """An exported program and what is needed to make a Graph of it.

    `copies` are constants that the trace has read as copies, with the tensors themselves, by the number of the copy.
    The program's last outputs are those of `checks`.
    """

    model: nn.Module
    exported: ExportedProgram
    example: Example
    notes: tuple[str, ...]
    input_tree: Tree
    output_tree: Tree
    has_loss_fn: bool
    asked: AskedRowDims
    numbers: bool
    observed: Tree | None = None
    asks_layout: str = ""
    copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    leaf_calls: tuple[OpaqueCall, ...] = ()
    takes_one_row: bool = False

    def graph(self, training: bool) -> Graph:
        """Make the Graph.

        Raises:
            CaptureError: for control flow, writes that cannot be followed, or changed parameters.
        """
        flat = inline_regions(self.exported.graph_module)
        has_loss = self.has_loss_fn or any(leaf.name == LOSS for leaf in walk(self.output_tree))
        tree = settled_numbers(flat, self.output_tree, wanted=self.numbers or not has_loss)
        settled = replace(self, output_tree=tree)
        return settled._graph(flat, training)

    def _graph(self, flat: fx.Graph, training: bool) -> Graph:
        for node in flat.nodes:
            meta.set_module_stack(node, _stack_in_model(node))
        leaves = self._merge_tied(flat, self._leaves(flat))
        outputs = self._outputs(flat, self._trained(flat, leaves))
        differentiable = [leaf.node for leaf in leaves if _may_carry_gradient(leaf)]
        remove_detached(flat, gradient_carriers(flat, differentiable))
        outputs += self._buffer_updates(flat, leaves, functionalize(flat, differentiable))
        detach_at_exits(flat, differentiable)
        clean(flat)
        name_masks(flat)
        leaves = _without_unused_constants(flat, leaves)
        symbol, tree = self._batch_symbol(leaves), without_opaque(self.output_tree)
        leaves = tuple(self._with_row_dim(leaf, symbol) for leaf in leaves)
        return Graph(
            graph=flat,
            leaves=leaves,
            outputs=outputs,
            input_tree=self.input_tree,
            output_tree=TensorSlot(outputs[0].name) if tree == TensorSlot("") else tree,  # of a bare tensor
            batch_symbol=symbol,
            fixed_rows=self._fixed_rows() if symbol is None else None,
            training=training,
            block_paths=find_blocks(meta.module_stack(node) for node in flat.nodes),
            constants=self._constants(leaves),
            observed=None if self.observed is None else without_opaque(self.observed),
            layout=self._layout(),
            conditions=meta.conditions(flat, symbol, takes_one_row=self.takes_one_row),
            checks=self.checks,
            leaf_calls=self.leaf_calls,
        ).with_note(*self.notes, *self._notes(), *_without_rows(leaves))

    def _leaves(self, flat: fx.Graph) -> tuple[Leaf, ...]:
        specs = {spec.arg.name: spec for spec in self.exported.graph_signature.input_specs}
        inputs = iter(self.example.tensors)
        placeholders = [node for node in flat.nodes if node.op == "placeholder"]
        return tuple(_leaf(node, specs[node.name], inputs) for node in placeholders)

    def _merge_tied(self, flat: fx.Graph, leaves: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        """Make one leaf of every parameter or buffer that has several FQNs."""
        names: dict[int, list[str]] = {}
        state: dict[str, torch.Tensor] = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        for name, tensor in state.items():
            names.setdefault(id(tensor), []).append(name)
        merged: dict[str, Leaf] = {}
        for leaf in leaves:
            if leaf.kind not in (LeafKind.PARAMETER, LeafKind.BUFFER):
                merged[f"{leaf.kind}:{leaf.name}"] = leaf
                continue
            first, *aliases = names[id(state[leaf.name])]
            known = merged.get(f"state:{first}")
            if known is None:
                merged[f"state:{first}"] = Leaf(leaf.kind, first, leaf.node, leaf.persistent, tuple(aliases))
            else:
                leaf.node.replace_all_uses_with(known.node)
                flat.erase_node(leaf.node)
        return tuple(merged.values())

    def _trained(self, flat: fx.Graph, leaves: tuple[Leaf, ...]) -> set[fx.Node]:
        """Return the nodes that give a gradient to parameters that are trained."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        parameters = (leaf for leaf in leaves if leaf.kind is LeafKind.PARAMETER)
        return gradient_carriers(flat, [leaf.node for leaf in parameters if own[leaf.name].requires_grad])

    def _outputs(self, flat: fx.Graph, trained: Collection[fx.Node]) -> tuple[OutputLeaf, ...]:
        leaves = (*walk(self.output_tree), *(() if self.observed is None else walk(self.observed)))
        slots = [leaf for leaf in leaves if isinstance(leaf, TensorSlot)]
        names = [slot.name or "output" for slot in slots]
        output = flat.output_node()
        values: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
        first_check = len(values) - len(self.checks)
        values, asked = values[:first_check], values[first_check:]
        for check, node in zip(self.checks, asked, strict=True):
            _give_line(node, check)
        if self.has_loss_fn:
            _check_loss(values[-1])
            loss: int | None = len(names)
            if LOSS in names:  # the model's own loss gives way to loss_fn's
                values[names.index(LOSS)] = values.pop()
                loss = names.index(LOSS)
            else:
                names.append(LOSS)
        else:
            loss = _index_of_loss(names, values, trained)
        output.args = ((*values, *asked),)
        made = (_output_leaf(name, index == loss) for index, name in enumerate(names))
        return *made, *(OutputLeaf(check.name, OutputKind.CHECK) for check in self.checks)

    def _buffer_updates(
        self, flat: fx.Graph, leaves: tuple[Leaf, ...], written: Mapping[fx.Node, fx.Node]
    ) -> tuple[OutputLeaf, ...]:
        by_node = {leaf.node: leaf for leaf in leaves}
        buffers = [(by_node[node], value) for node, value in written.items()]
        for leaf, value in buffers:
            if leaf.kind is not LeafKind.BUFFER:
                raise CaptureError(
                    f"forward changes the {leaf.kind} {leaf.name!r} in place ({meta.source_line(value)}); "
                    f"only registered buffers may be changed by forward\nhint: {WAY_OUT}"
                )
        output = flat.output_node()
        output.args = ((*output.args[0], *(value for _, value in buffers)),)  # type: ignore[misc]
        return tuple(OutputLeaf(leaf.name, OutputKind.BUFFER_UPDATE) for leaf, _ in buffers)

    def _batch_symbol(self, leaves: tuple[Leaf, ...]) -> Any:
        dims = self.example.row_dims
        sizes = [meta.shape(leaf.node)[dims[leaf.name]] for leaf in leaves if _is_input(leaf) and leaf.name in dims]
        return meta.expression(sizes[0]) if sizes and meta.is_symbolic(sizes[0]) else None

    def _layout(self) -> InputLayout | None:
        """Return how inputs must lie in memory, if the forward has asked."""
        if not self.asks_layout:
            return None
        return InputLayout(self.asks_layout, {name: order_in_memory(x) for name, x in self.example.tensors.items()})

    def _fixed_rows(self) -> FixedRows | None:
        """Return the rows that every batch must have, if inputs have any."""
        dims = self.example.row_dims
        return FixedRows(int(self.example.rows[0]), dims) if dims and all(self.example.rows) else None

    def _with_row_dim(self, leaf: Leaf, symbol: Any) -> Leaf:
        """Return a leaf with the dim that has as many entries as the batch has rows, whatever batch it is.

        Raises:
            BatchError: the user says that this input has no rows.
        """
        if not _is_input(leaf) or symbol is None:
            return leaf
        found = [dim for dim, size in enumerate(meta.shape(leaf.node)) if meta.expression(size) == symbol]
        if found and self.asked.denies(leaf.name):
            raise BatchError(
                f"row_dims says that input {leaf.name!r} has no rows, but in the model's forward its dim {found[0]} "
                f"must be as large as the batch has rows\nhint: name that dim, or pass the input in the size of one "
                f"row, which all rows use"
            )
        dim = self.example.row_dims.get(leaf.name, found[0] if len(found) == 1 else None)
        return replace(leaf, row_dim=dim if dim in found else None)

    def _constants(self, leaves: tuple[Leaf, ...]) -> dict[str, torch.Tensor]:
        values = {_fqn(name): value for name, value in self.exported.constants.items()}
        values = {name: self.copies.get(id(value), (value, value))[1] for name, value in values.items()}
        return {leaf.name: values[leaf.name] for leaf in leaves if leaf.kind is LeafKind.CONSTANT}

    def _notes(self) -> Iterator[str]:
        for leaf in walk(self.output_tree):
            if isinstance(leaf, Opaque):
                yield f"output {leaf.name!r} of type {leaf.type_name} is not returned: it says so when it is used"
            if isinstance(leaf, Constant) and isinstance(leaf.value, WithheldNumber):
                yield f"output {leaf.name!r} is a Python value that is not returned: it says so when it is used"
        for leaf in walk(self.input_tree):
            if isinstance(leaf, Opaque):
                yield f"input {leaf.name!r} is of type {leaf.type_name}: it is baked in as it is"


def _give_line(node: fx.Node, check: Check) -> None:
    """Let what is made at the end of a trace, of values that a check has asked for, be of the check's line."""
    if node.op == "call_function" and meta.source_line(node) == meta.UNKNOWN_LINE:
        meta.set_source_line(node, check.where)
        for made in node.all_input_nodes:
            _give_line(made, check)


def _is_input(leaf: Leaf) -> bool:
    return leaf.kind is LeafKind.INPUT


def _without_rows(leaves: tuple[Leaf, ...]) -> Iterator[str]:
    """Say which inputs have no rows, where others have some."""
    inputs = [leaf for leaf in leaves if _is_input(leaf) and meta.shape(leaf.node)]
    if any(leaf.row_dim is not None for leaf in inputs):
        for leaf in inputs:
            if leaf.row_dim is None:
                yield f"input {leaf.name!r} has no dim that counts rows: all ranks must pass the same"


def _leaf(node: fx.Node, spec: InputSpec, inputs: Iterator[str]) -> Leaf:
    if spec.kind not in LEAF_KINDS:
        raise CaptureError(f"the model uses a {spec.kind} object ({spec.target}), which cannot be captured")
    kind = LEAF_KINDS[spec.kind]
    name = next(inputs) if kind is LeafKind.INPUT else _fqn(str(spec.target))
    readable = re.sub(r"\W", "_", f"{kind}_{name}" if name[:1].isdigit() else name)
    rename(node, readable)
    node.target = node.name
    return Leaf(kind, name, node, persistent=spec.persistent is not False)


def _fqn(target: str) -> str:
    return target.removeprefix(MODEL_PREFIX)


def _stack_in_model(node: fx.Node) -> meta.ModuleStack:
    """Return the node's module stack with the names that the user's model has."""
    stack = meta.exported_module_stack(node)
    return tuple((_fqn(path), kind) for path, kind in stack if path.startswith(MODEL_PREFIX))


def _may_carry_gradient(leaf: Leaf) -> bool:
    kinds = (LeafKind.PARAMETER, LeafKind.INPUT)
    return leaf.kind in kinds and carries_gradient(meta.dtype(leaf.node))


def _without_unused_constants(flat: fx.Graph, leaves: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
    unused = [leaf for leaf in leaves if leaf.kind is LeafKind.CONSTANT and not leaf.node.users]
    for leaf in unused:
        flat.erase_node(leaf.node)
    return tuple(leaf for leaf in leaves if leaf not in unused)


def _index_of_loss(names: list[str], values: list[fx.Node], trained: Collection[fx.Node]) -> int | None:
    nodes = dict(zip(names, values, strict=True))
    numbers = [n for n, node in nodes.items() if (n == LOSS or meta.shape(node) == ()) and _is_number(node)]
    found = loss_among(names, numbers, [name for name, node in nodes.items() if node in trained])
    return None if found is None else names.index(found)


def _check_loss(node: fx.Node) -> None:
    if not _is_number(node):
        raise CaptureError(
            f"loss_fn returns a tensor of shape {list(meta.shape(node))} and {meta.dtype(node)}, but a loss is one "
            f"real number for the whole batch\nhint: return the mean or the sum of it"
        )


def _is_number(node: fx.Node) -> bool:
    return all(size == 1 for size in meta.shape(node)) and is_real(meta.dtype(node))


def _output_leaf(name: str, is_loss: bool) -> OutputLeaf:
    if not is_loss:
        return OutputLeaf(name, OutputKind.VALUE)
    return OutputLeaf(LOSS if name == "output" else name, OutputKind.LOSS)
