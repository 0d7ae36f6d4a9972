"""Write the model's own graphs for one device, with or without their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.checkpoint.checkpoint import MAX_SHARD_SIZE, aliases_of, parse_size
from hetu_fx.checkpoint.tensor_files import plan_shards, write_weights
from hetu_fx.comm_ops.wire.consensus import together
from hetu_fx.export.onnx_file import write_onnx
from hetu_fx.export.picture import draw
from hetu_fx.export.runnable import export_runnable, open_sizes
from hetu_fx.export.single import Single, held_values, runnable_of, single_graphs
from hetu_fx.export.weights import gather_on_first
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.program.captures import Programs
from hetu_fx.switching.runtime import Runtime

FOLDER, WEIGHTS = "single", "weights"


def write_single(runtime: Runtime, programs: Programs, aside: Path, *, weights: bool, onnx: bool) -> dict[str, Any]:
    """Write the graphs on rank 0, and return what the manifest says of them there; collective.

    With `onnx`, the one for inference as ONNX, too.
    """
    table, homes = runtime.table, runtime.homes
    single = together(table, lambda: single_graphs(programs) if table.rank == 0 else None)
    values = gather_on_first(homes, table) if weights else {}
    entries = together(table, lambda: _write(single, runtime.model, values, aside, onnx) if single else {})
    return {"graphs": entries, "tied": aliases_of(runtime.model)}


def write_beside(runtime: Runtime, aside: Path) -> dict[str, Any]:
    """Write the weights in safetensors files; returns where each is. Collective."""
    folder, limit = aside / WEIGHTS, parse_size(MAX_SHARD_SIZE)
    together(runtime.table, lambda: folder.mkdir() if runtime.table.rank == 0 else None)
    together(runtime.table, lambda: write_weights(folder, runtime.homes, limit, runtime.table))
    shards = plan_shards(runtime.homes, limit)
    return {name: _form(runtime.homes[name], file) for file, names in shards.items() for name in names}


def _form(tensor: Tensor, file: str) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "file": f"{WEIGHTS}/{file}"}


def _write(single: Single, model: nn.Module, values: Mapping[str, Tensor], aside: Path, onnx: bool) -> dict[str, Any]:
    (aside / FOLDER).mkdir()
    entries: dict[str, Any] = {
        mode: _write_graph(graph, model, values, aside / FOLDER / f"{mode}.pt2", onnx and mode == "inference")
        for mode, graph in single.graphs.items()
    }
    return entries | {mode: {"missing": reason} for mode, reason in single.missing.items()}


def _write_graph(
    graph: Graph, model: nn.Module, values: Mapping[str, Tensor], path: Path, onnx: bool
) -> dict[str, Any]:
    runnable, title = runnable_of(graph, model), f"the single-device graph for {path.stem}"
    exported = export_runnable(runnable, {**values, **held_values(graph, model)}, title)
    torch.export.save(exported, path)
    path.with_suffix(".txt").write_text(f"{graph.graph}\n")
    path.with_suffix(".svg").write_text(draw(runnable, f"{type(model).__name__}: {title}", graph.block_paths))
    if onnx:
        names = [result.name for result in runnable.results if not result.is_update]
        write_onnx(exported, path.with_suffix(".onnx"), [arg.name for arg in runnable.arguments], names)
    return {
        **file_entry(path, path.parents[1]),
        **({"onnx": file_entry(path.with_suffix(".onnx"), path.parents[1])} if onnx else {}),
        "inputs": {leaf.name: open_sizes(leaf.node) for leaf in graph.leaves_of(LeafKind.INPUT)},
        "outputs": {leaf.name or "output": leaf.kind.value for leaf in graph.outputs},
        "notes": list(graph.notes),
    }


def file_entry(path: Path, folder: Path) -> dict[str, str]:
    """Name a file inside the export's folder."""
    return {"file": path.relative_to(folder).as_posix()}
