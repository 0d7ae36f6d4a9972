"""Export what runs: one `.pt2` per rank and variant, readable code beside it, and the single-device program.

    folder/manifest.json              what is there: variants, plans, slots, results, hashes
    folder/plans/NAME.json            the plans
    folder/variants/NAME/rank0.pt2    the device graph of rank 0 (torch.export), weights left out
    folder/variants/NAME/rank0.txt    the same, to read
    folder/single.pt2                 the model's own graph, for one device

A device graph takes its slots (inputs, parameters, values of earlier stages) as arguments, in order; the manifest
says where each parameter's part lies, so that `ExportedRank.load_weights` can cut it out of a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from hetu_fx.annotations.text import parse_annotation
from hetu_fx.comm_ops.groups import GroupTable, using
from hetu_fx.errors import ExportError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph
from hetu_fx.switching.agreement import together
from hetu_fx.switching.buffers import local_part
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.graph_variant import GraphVariant, StagePlan
from hetu_fx.switching.program import Program
from hetu_fx.switching.runtime import Runtime
from hetu_fx.transforms.deduced import DeducedGraph
from hetu_fx.transforms.device_graph import DeviceGraph, Slot, SlotKind

FORMAT = "hetu_fx.export/1"
_TRACES = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "custom")


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
    aside = folder.with_name(f"{folder.name}.partial")
    rank = runtime.table.rank
    together(runtime.table, lambda: _make_room(folder, aside) if rank == 0 else None)
    with using(runtime.table):
        entries = together(runtime.table, lambda: _export_variants(runtime, program, aside))
    gathered = _gathered(runtime.table, entries)
    together(runtime.table, lambda: _finish(runtime, program, aside, folder, gathered) if rank == 0 else None)


def _make_room(folder: Path, aside: Path) -> None:
    if folder.exists() and not (folder / "manifest.json").exists():
        raise ExportError(f"{folder} exists and is not an export; choose another folder")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _export_variants(runtime: Runtime, program: Program, folder: Path) -> dict[str, Any]:
    return {
        name: _export_variant(variant, program, folder / "variants" / name)
        for name, variant in runtime.variants.items()
        if isinstance(variant, GraphVariant)
    }


def _export_variant(variant: GraphVariant, program: Program, folder: Path) -> dict[str, Any] | None:
    stage = variant.stage(program, False)
    if stage.device is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{stage.device.rank}.pt2"
    exported = export_device(stage.deduced, stage.device)
    torch.export.save(exported, path)
    path.with_suffix(".txt").write_text(str(stage.device.graph) + "\n")
    return {
        "file": str(path.relative_to(folder.parent.parent)),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "pipeline": stage.device.layout.pipeline,
        "stage": stage.device.layout.index,
        "slots": [_slot_entry(stage, slot) for slot in stage.device.slots],
        "results": [{"kind": r.kind.value, "name": r.name} for r in stage.device.results],
    }


def _slot_entry(stage: StagePlan, slot: Slot) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": slot.kind.value, "name": slot.name}
    assert stage.device is not None
    if slot.kind in (SlotKind.PARAMETER, SlotKind.BUFFER):
        node = _slot_node(stage.deduced.annotated.graph, slot)
        entry["lies"] = str(stage.deduced.value_annotation(node, stage.device.layout))
        entry["shape"] = list(meta.hints(node))
    return entry


def export_device(deduced: DeducedGraph, device: DeviceGraph) -> torch.export.ExportedProgram:
    """Export one rank's graph; open sizes stay open."""
    graph = deduced.annotated.graph
    examples, dims = [], []
    for slot in device.slots:
        node = _slot_node(graph, slot)
        shape = _local_hints(deduced, device, node, slot)
        examples.append(torch.zeros(shape, dtype=meta.dtype(node)))
        dims.append(_open_dims(node))
    module = fx.GraphModule(torch.nn.Module(), device.graph)
    return _exported(module, tuple(examples), tuple(dims), device.rank)


def export_single(graph: Graph) -> torch.export.ExportedProgram:
    """Export the captured program as it is, leaves as arguments."""
    nodes = [leaf.node for leaf in graph.leaves]
    examples = tuple(torch.zeros(meta.hints(node), dtype=meta.dtype(node)) for node in nodes)
    return _exported(graph.module(), examples, tuple(map(_open_dims, nodes)), 0)


def _exported(
    module: fx.GraphModule, examples: tuple[Tensor, ...], dims: tuple[Any, ...], rank: int
) -> torch.export.ExportedProgram:
    try:
        with using(GroupTable.dry(rank, rank + 1)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, examples, dynamic_shapes=dims, strict=False)
    except Exception as error:
        raise ExportError(f"the graph of rank {rank} cannot be exported: {error}") from error
    for node in exported.graph.nodes:
        for key in _TRACES:  # they carry paths of the author's machine
            node.meta.pop(key, None)
    exported.example_inputs = None  # they are as large as the weights, which the file leaves out
    return exported


def _open_dims(node: fx.Node) -> dict[int, Any]:
    return {i: torch.export.Dim.AUTO for i, size in enumerate(meta.shape(node)) if meta.is_symbolic(size)}


def _local_hints(deduced: DeducedGraph, device: DeviceGraph, node: fx.Node, slot: Slot) -> tuple[int, ...]:
    annotation = deduced.value_annotation(node, device.layout)
    local = annotation.local_shape(device.rank, deduced.shape(node))
    return tuple(hint if size is None else size for size, hint in zip(local, meta.hints(node), strict=True))


def _slot_node(graph: Graph, slot: Slot) -> fx.Node:
    if slot.kind is SlotKind.RECEIVED:
        nodes: Iterable[fx.Node] = graph.graph.nodes
        return next(node for node in nodes if node.name == slot.name)
    return next(leaf.node for leaf in graph.leaves if (leaf.kind.value, leaf.name) == (slot.kind.value, slot.name))


def _gathered(table: GroupTable, mine: dict[str, Any]) -> list[dict[str, Any]]:
    if table.size == 1:
        return [mine]
    everyone: list[Any] = [None] * table.size
    dist.all_gather_object(everyone, mine, group=table.base)
    return everyone


def _finish(runtime: Runtime, program: Program, aside: Path, folder: Path, entries: list[dict[str, Any]]) -> None:
    torch.export.save(export_single(program.graph), aside / "single.pt2")
    (aside / "plans").mkdir(exist_ok=True)
    for name, variant in runtime.variants.items():
        variant.plan.write(aside / "plans" / f"{name}.json")
    manifest = {
        "format": FORMAT,
        "torch": torch.__version__,
        "model": type(runtime.model).__qualname__,
        "imports": ["hetu_fx.comm_ops", "hetu_fx.transforms.random_ops"],
        "world": runtime.table.size,
        "single": {
            "file": "single.pt2",
            "slots": [{"kind": x.kind.value, "name": x.name} for x in program.graph.leaves],
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
    _replace(aside, folder)


def _replace(aside: Path, folder: Path) -> None:
    """Put the new folder in the place of the old one; the old one goes only once the new one is there."""
    _sync(aside)
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(aside, folder)
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@dataclass(frozen=True)
class ExportedRank:
    """One rank's exported graph, loaded.

    Call it with values by (kind, name), such as {("input", "input_ids"): ids, ("parameter", "lm_head.weight"): w};
    it returns results by (kind, name). Communication inside it goes to the ranks of torch.distributed's world.
    """

    rank: int
    program: torch.export.ExportedProgram
    slots: tuple[Mapping[str, Any], ...]
    results: tuple[tuple[str, str], ...]

    def __call__(self, values: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
        """Run the graph."""
        keys = [(slot["kind"], slot["name"]) for slot in self.slots]
        missing = [key for key in keys if key not in values]
        if missing:
            raise ExportError(f"the exported graph of rank {self.rank} needs values for {missing}")
        made = self.program.module()(*(values[key] for key in keys))
        return dict(zip(self.results, made, strict=True))

    def load_weights(self, tensors: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
        """Return this rank's parts of whole parameters and buffers, given by name, as values to call with."""
        parts = {}
        for slot in self.slots:
            if "lies" in slot:
                whole = tensors[slot["name"]]
                part = local_part(whole, parse_annotation(slot["lies"]), self.rank)
                parts[slot["kind"], slot["name"]] = part.contiguous()
        return parts


def load_exported(folder: str | Path, variant: str, rank: int) -> ExportedRank:
    """Load one rank's graph of an exported variant.

    Raises:
        ExportError: the folder is no export, was written by another format, has no such graph, or is damaged.
    """
    manifest = _manifest(Path(folder))
    try:
        entry = manifest["variants"][variant]["ranks"][str(rank)]
    except KeyError as error:
        known = {name: sorted(v["ranks"]) for name, v in manifest["variants"].items()}
        raise ExportError(f"{folder} has no graph of variant {variant!r} for rank {rank}; it has {known}") from error
    path = Path(folder) / entry["file"]
    if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        raise ExportError(f"{path} has changed since it was exported (its hash differs); export again")
    with _imports(manifest["imports"]):
        program = torch.export.load(path)
    results = tuple((result["kind"], result["name"]) for result in entry["results"])
    return ExportedRank(rank, program, tuple(entry["slots"]), results)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.exists():
        raise ExportError(f"{folder} is no export: there is no manifest.json in it")
    manifest: dict[str, Any] = json.loads(path.read_text())
    if manifest.get("format") != FORMAT:
        raise ExportError(f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT!r}")
    return manifest


@contextlib.contextmanager
def _imports(names: list[str]) -> Iterator[None]:
    """Make the ops known that the file uses; names come from a file, so only our own modules are imported."""
    for name in names:
        if not name.startswith("hetu_fx."):
            raise ExportError(f"the export asks for module {name!r}, which is not part of hetu_fx; refused")
        import_module(name)
    yield
