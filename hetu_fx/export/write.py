"""Export what runs: the model's own graphs for one device, and one graph per rank and variant.

    folder/manifest.json              what is there: graphs, what they take and make, hashes, fingerprints
    folder/plans/NAME.json            the plans
    folder/single/training.pt2        the model's own graph for one device, as plain torch.export.load runs it, with its
                                      weights; single/evaluation.pt2 and inference.pt2 as well, where they can be made
    folder/single/inference.onnx      the same as ONNX, where that was asked for
    folder/variants/NAME/rank0.pt2    the device graph of rank 0, with this rank's parts of the weights
    folder/.../*.txt, *.svg           each graph, to read, and its picture
    folder/.../*.units.txt            where a rank gathers its parameters and lets them go, under zero 3
    folder/weights/model.safetensors  the weights, where the graphs are to be without them

What is written for one device needs nothing of hetu_fx. A device graph needs `import hetu_fx`, which makes its ops
known; it takes its slots (inputs, counts, values of earlier stages) by keyword. See `hetu_fx.export.load`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from hetu_fx.checkpoint.folders import replaced_folder, why_not_replaced
from hetu_fx.checkpoint.tensor_files import plan_shards
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.consensus import all_gather_object, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import ExportError
from hetu_fx.export import FORMAT
from hetu_fx.export.graph_svg import draw
from hetu_fx.export.load import model_facts
from hetu_fx.export.onnx_file import check_onnx_is_there
from hetu_fx.export.runnable import Argument, Place, Result, Runnable, StateSlot, export_runnable
from hetu_fx.export.single import MESSAGE_BYTES, check_room, file_entry, write_single, write_weight_files
from hetu_fx.graph import meta
from hetu_fx.graph.containers import Entries, TensorSlot
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.home.ops import get_home_layout, own_pieces
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.step.compiled_plans import GraphVariant, StagePlan
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.lowering.weights_later import without_waiting
from hetu_fx.transforms.show import show_stage
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, GraphSlot, ResultKind, SlotKind


def export_runtime(runtime: Runtime, folder: Path, *, weights: bool = True, onnx: bool = False) -> None:
    """Export all variants of the training program; collective. The folder must not exist, or be an export.

    Args:
        runtime: what runs the model.
        folder: replaced as a whole once the new one is complete.
        weights: put the weights into the graphs; else they are written in safetensors files beside them.
        onnx: write the single-device graph for inference as ONNX, too.

    Raises:
        ExportError: the folder is something else, a graph cannot be exported, there are no graphs, a rank has no room
            for the weights, or the model has changed since its last training batch; on every rank.
    """
    if not isinstance(runtime.execution, GraphExecution):
        raise ExportError(
            "the model runs as it is (capture='eager'), so there are no graphs to export\nhint: save its weights by "
            "model.hetu.save(folder), or make it capturable and use capture='graph'"
        )
    programs, table = runtime.execution.programs, runtime.table
    _check_leaves(programs.training)
    raise_on_all_ranks(table, lambda: _check(folder, weights, onnx) if table.rank == 0 else None)
    runtime.in_flight.settle()
    with using(table), replaced_folder(folder, table, ExportError) as aside:
        runtime.buffers.sync()
        single = write_single(runtime, programs, aside, weights=weights, onnx=onnx)
        beside = {} if weights else write_weight_files(runtime, aside)
        variants = {
            name: all_gather_object(table, _export_variant(runtime, variant, programs.training, aside, weights))
            for name, variant in runtime.variants.items()
            if isinstance(variant, GraphVariant)
        }
        raise_on_all_ranks(
            table, lambda: _finish(runtime, aside, single, beside, variants) if table.rank == 0 else None
        )


def _check_leaves(program: Program) -> None:
    """Refuse graphs that call modules as they are: these are Python, of which an archive has nothing."""
    if program.graph.leaf_calls:
        labels = ", ".join(dict.fromkeys(call.label for call in program.graph.leaf_calls))
        raise ExportError(
            f"the model calls {labels} as it is (see hetu_fx.leaf), which no exported graph can do\n"
            "hint: save its weights by model.hetu.save(folder), or export the model without it"
        )


def _check(folder: Path, weights: bool, onnx: bool) -> None:
    if onnx:
        check_onnx_is_there()
    if onnx and not weights:
        raise ExportError("an ONNX file has its weights inside\nhint: export with weights=True, or without onnx=True")
    if why := why_not_replaced(folder):  # before anything is exported, which takes long
        raise ExportError(f"{folder} is there, and {why}\nhint: choose another folder")


def _export_variant(
    runtime: Runtime, variant: GraphVariant, program: Program, aside: Path, weights: bool
) -> dict[str, Any] | None:
    """Write this rank's graph of a variant; returns what the manifest says of it. Collective."""
    stage = variant.stage(program, False)  # makes its graph
    parts = _rank_parameters(runtime, stage.deduced) if weights else {}
    folder = aside / "variants" / variant.name
    return raise_on_all_ranks(runtime.table, lambda: _write(runtime, variant, stage, parts, folder))


def _write(
    runtime: Runtime, variant: GraphVariant, stage: StagePlan, parts: Mapping[str, Tensor], folder: Path
) -> dict[str, Any] | None:
    """Write this rank's graph, or those of all chunks of its stage, of which the first has the others beside it."""
    if not stage.devices:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    devices = [without_waiting(device) for device in stage.devices]
    names = [f"rank{device.rank}" + f".chunk{i}" * (i > 0) for i, device in enumerate(devices)]
    pairs = zip(devices, names, strict=True)
    if stage.units is not None:  # an exported graph has all its parameters; how a step gathers them is to be read
        paths = stage.deduced.annotated.graph.block_paths
        text = show_stage(variant.compute.module(stage.devices[0], paths, stage.units))
        (folder / f"{names[0]}.units.txt").write_text(f"{text}\n")
    first, *others = [_write_graph(runtime, stage, one, parts, folder / f"{name}.pt2") for one, name in pairs]
    return first | ({"chunks": others} if others else {})


def _write_graph(
    runtime: Runtime, stage: StagePlan, device: DeviceGraph, parts: Mapping[str, Tensor], path: Path
) -> dict[str, Any]:
    buffers = {name: runtime.buffers.read(name, at) for name, at in stage.buffers.items()}
    held = {name: _own(value) for name, value in {**stage.constants, **buffers}.items()}
    with using(GroupTable.dry(device.rank, runtime.table.size)):
        runnable = _device_runnable(stage, device, runtime.model)
        exported = export_runnable(runnable, {**parts, **held}, f"the graph of rank {device.rank}")
    torch.export.save(exported, path)
    path.with_suffix(".txt").write_text(f"{device.graph}\n")
    title = f"{type(runtime.model).__name__}: what rank {device.rank} runs"
    path.with_suffix(".svg").write_text(draw(runnable, title, stage.deduced.annotated.graph.block_paths))
    return {
        **file_entry(path, path.parents[2]),
        "pipeline": device.layout.pipeline,
        "stage": device.layout.index,
        "slots": [
            _slot_entry(stage, device, slot, named.name)
            for slot, named in zip(device.slots, _slots_of(device), strict=True)
        ],
        "results": [{"name": r.name, "kind": r.kind} for r in _named_results(device)],
    }


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _slot_entry(stage: StagePlan, device: DeviceGraph, slot: GraphSlot, name: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "kind": slot.kind.value}
    if name != slot.name:
        entry["of"] = slot.name
    if slot.kind in (SlotKind.PARAMETER, SlotKind.BUFFER):
        node = _slot_node(stage.deduced.annotated.graph, slot)
        entry["lies"] = str(stage.deduced.value_annotation(node, device.layout))
        entry["shape"] = list(meta.hints(node))
    return entry


def _finish(
    runtime: Runtime,
    aside: Path,
    single: Mapping[str, Any],
    beside: Mapping[str, Any],
    variants: Mapping[str, list[dict[str, Any] | None]],
) -> None:
    """Write the plans and the manifest."""
    manifest = {
        "format": FORMAT,
        "torch": torch.__version__,
        "model": model_facts(runtime.model),
        "world": runtime.table.size,
        "single": single,
        "weights": beside,
        "variants": {
            name: {
                "plan": _write_plan(runtime.variants[name].plan, aside / "plans" / f"{name}.json"),
                "ranks": {str(rank): entry for rank, entry in enumerate(ranks) if entry},
            }
            for name, ranks in variants.items()
        },
    }
    (aside / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def _write_plan(plan: Plan, path: Path) -> dict[str, str]:
    path.parent.mkdir(exist_ok=True)
    plan.write(path)
    return file_entry(path, path.parents[1])


STATES = (SlotKind.PARAMETER, SlotKind.BUFFER, SlotKind.CONSTANT)


@dataclass(frozen=True)
class NamedResult:
    """A slot or a result, and the name that callers have for it."""

    name: str
    kind: str
    model_name: str


def _rank_parameters(runtime: Runtime, deduced: DeducedGraph) -> dict[str, Tensor]:
    """Return this rank's parts of the parameters, as the graph reads them; collective.

    Raises:
        ExportError: on every rank, where one has no room for them.
    """
    table, leaves = runtime.table, {leaf.name: leaf for leaf in deduced.parameters()}
    homes: dict[str, Any] = {name: runtime.homes[name] for name in leaves}
    own = own_pieces(homes)
    targets = {name: deduced.parameter_annotations(leaf)[0] for name, leaf in leaves.items()}
    moves = {
        name: TensorMove(get_home_layout(home).annotation, targets[name], tuple(home.shape), home.element_size())
        for name, home in homes.items()
    }
    raise_on_all_ranks(table, lambda: check_room(_bytes_here(moves, table.rank), f"the parts of rank {table.rank}"))
    found: dict[str, Tensor] = {}
    for names in plan_shards(homes, MESSAGE_BYTES).values():
        pieces = [own[name] if moves[name].source.holds(table.rank) else None for name in names]
        plan = plan_moves([moves[name] for name in names])
        made = run_moves(plan, pieces, table, like=[own[name] for name in names])
        found |= {
            n: part for n, part in zip(names, made, strict=True) if part is not None and targets[n].holds(table.rank)
        }
    return {name: part.detach().to("cpu").contiguous() for name, part in found.items()}


def _bytes_here(moves: Mapping[str, TensorMove], rank: int) -> int:
    held = (move for move in moves.values() if move.target.holds(rank))
    sizes = [move.itemsize * _numel(move.target.local_shape(rank, move.shape)) for move in held]
    return sum(sizes) + min(sum(sizes), MESSAGE_BYTES)


def _numel(shape: Sequence[int | None]) -> int:
    found = 1
    for size in shape:
        found *= size or 0
    return found


def _device_runnable(stage: StagePlan, device: DeviceGraph, model: nn.Module) -> Runnable:
    """Return what a `.pt2` is made of, for a graph that one rank runs."""
    places = tuple(
        _place(stage, device, slot, name, model) for slot, name in zip(device.slots, _slots_of(device), strict=True)
    )
    updated = {place.name: place.shape for place in places if isinstance(place, StateSlot) and not place.is_parameter}
    results = tuple(
        Result(result.model_name if in_place else result.name, in_place)
        for result in _named_results(device)
        for in_place in [_fits(stage, device.rank, result, updated)]
    )
    names = tuple(place.name for place in places if isinstance(place, Argument))
    return Runnable(device.graph, places, results, Entries(dict, names, tuple(map(TensorSlot, names))))


def _fits(stage: StagePlan, rank: int, result: NamedResult, buffers: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether a result is the new value of a buffer that lies here as the graph reads it."""
    if result.kind != ResultKind.BUFFER_UPDATE or result.model_name not in buffers:
        return False
    at = stage.updates[result.model_name]
    return at.holds(rank) and at == stage.buffers[result.model_name]


def _place(stage: StagePlan, device: DeviceGraph, slot: GraphSlot, named: NamedResult, model: nn.Module) -> Place:
    node = _slot_node(stage.deduced.annotated.graph, slot)
    shape = _local_hints(stage.deduced, device, node)
    if slot.kind not in STATES:
        return Argument(named.name, node, shape)
    if slot.kind is SlotKind.PARAMETER:
        return StateSlot(slot.name, node, shape, True, model.get_parameter(slot.name).requires_grad)
    saved = {leaf.name for leaf in stage.deduced.annotated.graph.leaves_of(LeafKind.BUFFER) if leaf.persistent}
    return StateSlot(slot.name, node, shape, False, is_saved=slot.kind is SlotKind.BUFFER and slot.name in saved)


def _slots_of(device: DeviceGraph) -> list[NamedResult]:
    """Return what the graph reads, in its order: what the caller gives has the name of a keyword."""
    given = [slot for slot in device.slots if slot.kind not in STATES]
    words = dict(zip(given, _unlike(slot.name for slot in given), strict=True))
    return [NamedResult(words.get(slot, slot.name), slot.kind.value, slot.name) for slot in device.slots]


def _named_results(device: DeviceGraph) -> list[NamedResult]:
    """Return what the graph makes, in its order."""
    names = _unlike((result.name or "output" for result in device.results), keywords=False)
    return [
        NamedResult(name, result.kind.value, result.name) for name, result in zip(names, device.results, strict=True)
    ]


def _unlike(names: Iterable[str], keywords: bool = True) -> Iterator[str]:
    """Yield names that are unlike each other; as keywords of a call, if asked."""
    taken: set[str] = set()
    for name in names:
        word = re.sub(r"^(?=\d)|\W", "_", name) if keywords else name
        while word in taken:
            word += "_"
        taken.add(word)
        yield word


def _local_hints(deduced: DeducedGraph, device: DeviceGraph, node: fx.Node) -> tuple[int, ...]:
    annotation = deduced.value_annotation(node, device.layout)
    local = annotation.local_shape(device.rank, deduced.shape(node))
    return tuple(hint if size is None else size for size, hint in zip(local, meta.hints(node), strict=True))


def _slot_node(graph: Graph, slot: GraphSlot) -> fx.Node:
    """Return the node of the whole graph that a slot of a device graph stands for."""
    if slot.kind is SlotKind.RECEIVED:
        nodes: Iterable[fx.Node] = graph.graph.nodes
        return next(node for node in nodes if node.name == slot.name)
    return next(leaf.node for leaf in graph.leaves if (leaf.kind.value, leaf.name) == (slot.kind.value, slot.name))
