"""Show a graph as text: leaves, ops with sizes, blocks and source lines, outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from hetu_fx.base.torch_private import OpOverload
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, Leaf

SHORT_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool",
}  # fmt: skip


Remark = Callable[[fx.Node], str]


def show(graph: Graph, remark: Remark | None = None) -> str:
    """Return the graph as text, one line per leaf, op and output, with a heading for each block.

    `remark` says what stands behind leaves and ops, instead of the source line; nothing stands where it says nothing.
    """
    return "\n".join(_lines(graph, remark or meta.source_line))


def _lines(graph: Graph, remark: Remark) -> Iterator[str]:
    mode = "training" if graph.training else "evaluation"
    batch = "static batch" if graph.batch_symbol is None else "dynamic batch"
    yield f"graph in {mode}, {batch}, {graph.num_blocks} blocks"
    for leaf in graph.leaves:
        said = "" if remark is meta.source_line else remark(leaf.node)
        yield f"  {_leaf_text(leaf, graph)}{said and f'  # {said}'}"
    block = None
    for node in graph.graph.nodes:
        if node.op == "call_function":
            if graph.block_of(node) != block:
                block = graph.block_of(node)
                yield f"  -- block {block}" if block is not None else "  --"
            said = remark(node)
            yield f"  {node.name}: {_node_value(node, graph)} = {call_text(node)}{said and f'  # {said}'}"
    for output, node in zip(graph.outputs, graph.output_values, strict=True):
        yield f"  return {output.kind} {output.name} = {node.name}"
    for note in graph.notes:
        yield f"  note: {note}"


def _leaf_text(leaf: Leaf, graph: Graph) -> str:
    aliases = f" (also {', '.join(leaf.aliases)})" if leaf.aliases else ""
    return f"{leaf.node.name}: {_node_value(leaf.node, graph)} = {leaf.kind} {leaf.name}{aliases}"


def _node_value(node: fx.Node, graph: Graph) -> str:
    """Return dtype and sizes of a node's value, e.g. f32[batch, s55, 48]; sizes alone for a SymInt."""
    return _value_text(meta.value(node) if meta.has_value(node) else None, graph)


def _value_text(example: Any, graph: Graph) -> str:
    if isinstance(example, torch.Tensor):
        sizes = ", ".join(_size_text(size, graph) for size in example.shape)
        return f"{SHORT_DTYPES.get(example.dtype, str(example.dtype))}[{sizes}]"
    if isinstance(example, (tuple, list)):
        return f"({', '.join(_value_text(item, graph) for item in example)})"
    return _size_text(example, graph)


def _size_text(size: Any, graph: Graph) -> str:
    text = str(size)
    return text if graph.batch_symbol is None else text.replace(str(graph.batch_symbol), "batch")


def call_text(node: fx.Node) -> str:
    """Return the call of an op node as text, e.g. linear(x, weight)."""
    arguments = [_argument_text(argument) for argument in node.args]
    arguments += [f"{key}={_argument_text(argument)}" for key, argument in node.kwargs.items()]
    return f"{op_name(node)}({', '.join(arguments)})"


def op_name(node: fx.Node) -> str:
    """Return the op's name without the aten namespace and the default overload."""
    if isinstance(node.target, OpOverload):
        return str(node.target).removeprefix("aten.").removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def _argument_text(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_argument_text(item) for item in argument)}]"
    return str(argument)
