"""Show every stage of a graph on its way to a device as text, as the passes make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from hetu_fx.base.torch_private import OpOverload
from hetu_fx.deduction.factors.factors import ClassDim
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, Leaf
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph, StageLayout
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.states import WHOLE, AxisState, DisjointPartial, SplitOn, Whole
from hetu_fx.transforms.lowering.units import MARKERS
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, Handover

SHORT_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool",
}  # fmt: skip

Remark = Callable[[fx.Node], str]


def show_stage(stage: object) -> str:
    """Return a stage as text: a captured, analysed, annotated or deduced graph, or that of a device."""
    match stage:
        case Graph():
            return show(stage)
        case AnalysedGraph():
            return "\n".join((show(stage.graph, lambda node: _classes_text(stage, node)), *_class_lines(stage)))
        case AnnotatedGraph():
            return "\n".join((*_plan_lines(stage), show(stage.graph, lambda node: _stage_text(stage, node))))
        case DeducedGraph():
            return show(stage.annotated.graph, lambda node: _states_text(stage, node))
        case DeviceGraph():
            return "\n".join(_device_lines(stage))
        case fx.GraphModule():
            return "\n".join(_module_lines("module", stage))
        case None:
            return "no graph: the plan leaves the rank out"
    return str(stage)


def _classes_text(analysed: AnalysedGraph, node: fx.Node) -> str:
    if not meta.is_tensor(node):
        return ""
    return " ".join(f"({_dim_text(dim)})" for dim in analysed.factors.dims(node))


def _dim_text(dim: ClassDim) -> str:
    return " ".join(f"#{factor.id}" for factor in dim)


def _class_lines(analysed: AnalysedGraph) -> Iterator[str]:
    for factor in analysed.factors.classes:
        where = ", ".join(f"dim {dim} of {leaf.name}" for leaf, dim in analysed.factors.leaf_dims(factor))
        size = "rows of the batch" if factor.is_batch else factor.text
        repeated = ", repeated" if factor in analysed.factors.repeated else ""
        yield f"  class #{factor.id}: {size}{repeated}{where and f'; {where}'}"


def _plan_lines(annotated: AnnotatedGraph) -> Iterator[str]:
    yield f"plan with {len(annotated.stages)} pipelines"
    for layout in annotated.layouts:
        yield f"  stage {_stage_name(layout.key)} on devices {list(layout.devices)}{_parts_text(layout)}"


def _stage_name(key: tuple[int, int]) -> str:
    pipeline, index = key
    return f"{pipeline}.{index}"


def _parts_text(layout: StageLayout) -> str:
    parts = [
        f"; {name} #{factor.id}: {list(sizes)}"
        for name, axis in zip(("context", "tensor", "fine"), layout.axes, strict=True)
        for factor, sizes in axis.sizes.items()
    ]
    return "".join(parts)


def _stage_text(annotated: AnnotatedGraph, node: fx.Node) -> str:
    """Say to which stage of each pipeline an op belongs; one that belongs to none is computed where it is read."""
    places = [f"{p}.{stages[node]}" for p, stages in enumerate(annotated.stage_of) if node in stages]
    return f"stage {' '.join(places)}" if places else ""


def _states_text(deduced: DeducedGraph, node: fx.Node) -> str:
    """Say how a value lies on the batch, context, tensor and fine axis, those left out on which it is whole."""
    axes = {"batch": deduced.batch, "context": deduced.context, "tensor": deduced.tensor_split, "fine": deduced.fine}
    said = [text for name, axis in axes.items() for text in _axis_texts(name, axis, node)]
    return ", ".join(said)


def _axis_texts(name: str, axis: AxisDeduction, node: fx.Node) -> Iterator[str]:
    """Say how a value comes out of its op along an axis, what it is made before others read it, and its cotangent."""
    state = axis.states.get(node, WHOLE)
    made = axis.made.get(node, state)
    if made != state:
        yield f"{name} {_state_text(made)}, then {_state_text(state)}"
    elif state != WHOLE:
        yield f"{name} {_state_text(state)}"
    if node in axis.summed_cotangents:
        yield f"cotangent summed over {name}"


def _state_text(state: AxisState) -> str:
    match state:
        case SplitOn(factor):
            return f"split on #{factor.id}"
        case DisjointPartial(factor):
            return f"spread by #{factor.id}"
        case Whole():
            return "whole"
    return "summed"


def _device_lines(device: DeviceGraph) -> Iterator[str]:
    yield f"rank {device.rank}, stage {_stage_name(device.layout.key)} of {device.num_stages}"
    slots = dict(zip(device.graph.find_nodes(op="placeholder"), device.slots, strict=True))
    runs = {node: number for number, run in enumerate(device.recomputed) for node in run}
    for node in device.graph.nodes:
        if node in slots:
            yield f"  {node.name} = {slots[node].kind} {slots[node].name}"
        elif node.op == "call_function":
            yield f"  {node.name} = {_call_text(node)}{f'  # recomputed in run {runs[node]}' if node in runs else ''}"
    values = device.graph.output_node().args[0]
    assert isinstance(values, Iterable)
    for result, value in zip(device.results, values, strict=True):
        yield f"  return {result.kind} {result.name} = {value}"
    yield from (f"  receive {_handover_text(handover)}" for handover in device.handovers_in)
    yield from (f"  send {_handover_text(handover)}" for handover in device.handovers_out)


def _handover_text(handover: Handover) -> str:
    return f"{handover.value.name} from stage {_stage_name(handover.source)} to {_stage_name(handover.target)}"


def _module_lines(name: str, module: fx.GraphModule) -> Iterator[str]:
    yield name
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                yield f"  {node.name} = given"
            case "output":
                yield f"  return {node.args[0]}"
            case _:
                yield f"  {node.name} = {_call_text(node)}"
    for child, inner in module.named_children():
        for body in [inner] if isinstance(inner, fx.GraphModule) else inner.children():
            if isinstance(body, fx.GraphModule):
                yield from _module_lines(child, body)


def show(graph: Graph, remark: Remark | None = None) -> str:
    """Return the graph as text, one line per leaf, op and output, with a heading for each block.

    `remark` says what stands behind leaves and ops, instead of the source line; nothing stands where it says nothing.
    """
    return "\n".join(_lines(graph, remark or meta.source_line))


def _lines(graph: Graph, remark: Remark) -> Iterator[str]:
    mode = "training" if graph.training else "evaluation"
    batch = "dynamic batch" if graph.takes_any_rows else "static batch"
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
            yield f"  {node.name}: {_node_value(node, graph)} = {_call_text(node)}{said and f'  # {said}'}"
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


def _call_text(node: fx.Node) -> str:
    """Return the call of an op node as text, e.g. linear(x, weight)."""
    arguments = [_argument_text(argument) for argument in node.args]
    arguments += [f"{key}={_argument_text(argument)}" for key, argument in node.kwargs.items()]
    return f"{op_name(node)}({', '.join(arguments)})"


def op_name(node: fx.Node) -> str:
    """Return the op's name without the aten namespace and the default overload."""
    if isinstance(node.target, OpOverload):
        return str(node.target).removeprefix("aten.").removesuffix(".default")
    name, _ = MARKERS.get(node.target, ("", None))
    return name or getattr(node.target, "__name__", str(node.target))


def _argument_text(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_argument_text(item) for item in argument)}]"
    return str(argument)
