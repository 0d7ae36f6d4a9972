"""Show every stage of a graph on its way to a device as text, as the passes make them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from hetu_fx.deduction.factors.factors import ClassDim
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.show import call_text, show
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph, StageLayout
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.states import WHOLE, AxisState, SplitOn, Spread, Whole
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, Handover


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
        for name, axis in zip(("context", "tensor"), layout.axes, strict=True)
        for factor, sizes in axis.sizes.items()
    ]
    return "".join(parts)


def _stage_text(annotated: AnnotatedGraph, node: fx.Node) -> str:
    """Say to which stage of each pipeline an op belongs; one that belongs to none is computed where it is read."""
    places = [f"{p}.{stages[node]}" for p, stages in enumerate(annotated.stage_of) if node in stages]
    return f"stage {' '.join(places)}" if places else ""


def _states_text(deduced: DeducedGraph, node: fx.Node) -> str:
    """Say how a value lies on the batch, context and tensor axis, those left out on which it is whole."""
    axes = {"batch": deduced.batch, "context": deduced.context, "tensor": deduced.tensor_split}
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
        case Spread(factor):
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
            yield f"  {node.name} = {call_text(node)}{f'  # recomputed in run {runs[node]}' if node in runs else ''}"
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
                yield f"  {node.name} = {call_text(node)}"
    for child, inner in module.named_children():
        for body in inner.children():
            if isinstance(body, fx.GraphModule):
                yield from _module_lines(child, body)
