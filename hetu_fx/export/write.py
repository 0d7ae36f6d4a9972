"""Export what runs: one `.pt2` per rank and variant, readable code beside it, and the single-device program.

    folder/manifest.json              what is there: variants, plans, slots, results, hashes
    folder/plans/NAME.json            the plans
    folder/variants/NAME/rank0.pt2    the device graph of rank 0 (torch.export), weights left out
    folder/variants/NAME/rank0.txt    the same, to read
    folder/variants/NAME/rank0.safetensors    what it needs and no checkpoint has: constants, unsaved buffers
    folder/single.pt2                 the model's own graph, for one device; single.safetensors as above

A device graph takes its slots (inputs, parameters, values of earlier stages) as arguments, in order; the manifest
says where each parameter's part lies, so that it can be cut out of a checkpoint; see `hetu_fx.export.load`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from hetu_fx.checkpoint.folders import FolderKind, digest, replaced_folder
from hetu_fx.comm_ops.wire.consensus import of_all, together
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import ExportError
from hetu_fx.export import FORMAT, OPS
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.program.program import Program
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.home.parameters import Buffers
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.step.compiled_plans import GraphVariant, StagePlan
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, GraphSlot, SlotKind


def export_runtime(runtime: Runtime, folder: Path) -> None:
    """Export all variants of the training program; collective. The folder must not exist, or be an export.

    Raises:
        ExportError: the folder is something else, a graph cannot be exported, or there are no graphs; on every rank.
    """
    if not isinstance(runtime.execution, GraphExecution):
        raise ExportError(
            "the model runs as it is (capture='eager'), so there are no graphs to export; save its weights by "
            "model.hetu.save(folder), or make it capturable and use capture='graph'"
        )
    program = runtime.execution.programs.training
    rank = runtime.table.rank
    together(runtime.table, lambda: _check_is_export(folder) if rank == 0 else None)
    with using(runtime.table), replaced_folder(folder, runtime.table, _EXPORT) as aside:
        for variant in _graph_variants(runtime).values():
            variant.stage(program, False)  # makes its graph; collective
        entries = together(runtime.table, lambda: _export_variants(runtime, program, aside))
        gathered = of_all(runtime.table, entries)
        together(runtime.table, lambda: _finish(runtime, program, aside, gathered) if rank == 0 else None)


def _is_export(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()


_EXPORT = FolderKind(ExportError, _is_export)


def _check_is_export(folder: Path) -> None:
    if folder.exists() and not _is_export(folder):
        raise ExportError(f"{folder} exists and is not an export; choose another folder")


def _export_variants(runtime: Runtime, program: Program, folder: Path) -> dict[str, Any]:
    return {
        name: _export_variant(runtime, variant, program, folder / "variants" / name)
        for name, variant in _graph_variants(runtime).items()
    }


def _graph_variants(runtime: Runtime) -> dict[str, GraphVariant]:
    return {name: variant for name, variant in runtime.variants.items() if isinstance(variant, GraphVariant)}


def _export_variant(runtime: Runtime, variant: GraphVariant, program: Program, folder: Path) -> dict[str, Any] | None:
    stage = variant.stage(program, False)
    if stage.device is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{stage.device.rank}.pt2"
    exported = _export_device(stage.deduced, stage.device)
    torch.export.save(exported, path)
    path.with_suffix(".txt").write_text(str(stage.device.graph) + "\n")
    save_file(_unsaved_values(stage, runtime.buffers), path.with_suffix(".safetensors"))
    return {
        **_file_entry(path),
        "values": _file_entry(path.with_suffix(".safetensors")),
        "pipeline": stage.device.layout.pipeline,
        "stage": stage.device.layout.index,
        "slots": [_slot_entry(stage, slot) for slot in stage.device.slots],
        "results": [{"kind": r.kind.value, "name": r.name} for r in stage.device.results],
    }


def _file_entry(path: Path) -> dict[str, str]:
    """Name a file of a variant inside the export's folder, with its hash."""
    return {"file": path.relative_to(path.parents[2]).as_posix(), "sha256": digest(path)}


def _unsaved_values(stage: StagePlan, buffers: Buffers) -> dict[str, Tensor]:
    """Return this rank's parts of what no checkpoint holds."""
    leaves = _unsaved_buffers(stage.deduced.annotated.graph)
    parts = {name: buffers.read(name, stage.buffers[name]) for name in leaves if name in stage.buffers}
    return _by_key(stage.constants, parts)


def _unsaved_buffers(graph: Graph) -> list[str]:
    return [leaf.name for leaf in graph.leaves_of(LeafKind.BUFFER) if not leaf.persistent]


def _by_key(constants: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under "kind/name", each with memory of its own."""
    values = {f"{SlotKind.CONSTANT}/{name}": value for name, value in constants.items()}
    values |= {f"{SlotKind.BUFFER}/{name}": value for name, value in buffers.items()}
    return {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in values.items()}


def _slot_entry(stage: StagePlan, slot: GraphSlot) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": slot.kind.value, "name": slot.name}
    assert stage.device is not None
    if slot.kind in (SlotKind.PARAMETER, SlotKind.BUFFER):
        node = _slot_node(stage.deduced.annotated.graph, slot)
        entry["lies"] = str(stage.deduced.value_annotation(node, stage.device.layout))
        entry["shape"] = list(meta.hints(node))
    return entry


def _export_device(deduced: DeducedGraph, device: DeviceGraph) -> torch.export.ExportedProgram:
    """Export one rank's graph; open sizes stay open."""
    nodes = [_slot_node(deduced.annotated.graph, slot) for slot in device.slots]
    shapes = [_local_hints(deduced, device, node) for node in nodes]
    return _exported(fx.GraphModule(torch.nn.Module(), device.graph), nodes, shapes, device.rank)


def _export_single(graph: Graph) -> torch.export.ExportedProgram:
    """Export the captured program as it is, leaves as arguments."""
    nodes = [leaf.node for leaf in graph.leaves]
    return _exported(graph.module(), nodes, list(map(meta.hints, nodes)), 0)


def _exported(
    module: fx.GraphModule, nodes: Sequence[fx.Node], shapes: Sequence[Sequence[int]], rank: int
) -> torch.export.ExportedProgram:
    """Export a graph that takes values like those of `nodes`, of these shapes on this rank."""
    examples = tuple(torch.zeros(s, dtype=meta.dtype(n)) for s, n in zip(shapes, nodes, strict=True))
    dims = tuple(map(_open_dims, nodes))
    try:
        with using(GroupTable.dry(rank, rank + 1)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, examples, dynamic_shapes=dims, strict=False)
    except Exception as error:
        raise ExportError(f"the graph of rank {rank} cannot be exported: {error}") from error
    for node in exported.graph.nodes:
        meta.forget_traces(node)
    exported.example_inputs = None  # they are as large as the weights, which the file leaves out
    return exported


def _open_dims(node: fx.Node) -> dict[int, Any]:
    return {i: torch.export.Dim.AUTO for i, size in enumerate(meta.shape(node)) if meta.is_symbolic(size)}


def _local_hints(deduced: DeducedGraph, device: DeviceGraph, node: fx.Node) -> tuple[int, ...]:
    annotation = deduced.value_annotation(node, device.layout)
    local = annotation.local_shape(device.rank, deduced.shape(node))
    return tuple(hint if size is None else size for size, hint in zip(local, meta.hints(node), strict=True))


def _slot_node(graph: Graph, slot: GraphSlot) -> fx.Node:
    if slot.kind is SlotKind.RECEIVED:
        nodes: Iterable[fx.Node] = graph.graph.nodes
        return next(node for node in nodes if node.name == slot.name)
    return next(leaf.node for leaf in graph.leaves if (leaf.kind.value, leaf.name) == (slot.kind.value, slot.name))


def _finish(runtime: Runtime, program: Program, aside: Path, entries: list[dict[str, Any]]) -> None:
    graph = program.graph
    torch.export.save(_export_single(graph), aside / "single.pt2")
    unsaved = {name: runtime.model.get_buffer(name) for name in _unsaved_buffers(graph)}
    save_file(_by_key(graph.constants, unsaved), aside / "single.safetensors")
    (aside / "plans").mkdir(exist_ok=True)
    for name, variant in runtime.variants.items():
        variant.plan.write(aside / "plans" / f"{name}.json")
    manifest = {
        "format": FORMAT,
        "torch": torch.__version__,
        "model": type(runtime.model).__qualname__,
        "imports": list(OPS),
        "world": runtime.table.size,
        "single": {
            "file": "single.pt2",
            "values": "single.safetensors",
            "slots": [{"kind": x.kind.value, "name": x.name} for x in graph.leaves],
        },
        "variants": {
            name: {
                "plan": f"plans/{name}.json",
                "ranks": {str(rank): entry[name] for rank, entry in enumerate(entries) if entry[name]},
            }
            for name in runtime.variants
        },
    }
    (aside / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
