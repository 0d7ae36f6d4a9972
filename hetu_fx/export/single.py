"""The model's own graphs for one device, and their files: for training, evaluation, and inference (without labels)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from hetu_fx.checkpoint.checkpoint import MAX_SHARD_SIZE, parse_size, tied_names
from hetu_fx.checkpoint.tensor_files import bring_to_first, plan_shards, write_weights
from hetu_fx.cluster.host import memory_left
from hetu_fx.comm_ops.wire.consensus import raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CaptureError, ExportError, HetuFxError
from hetu_fx.export.graph_svg import draw
from hetu_fx.export.onnx_file import write_onnx
from hetu_fx.export.runnable import (
    Argument,
    Place,
    Result,
    Runnable,
    StateSlot,
    export_runnable,
    open_sizes,
    plain_tree,
)
from hetu_fx.graph import meta
from hetu_fx.graph.bind import Batch
from hetu_fx.graph.capture import in_mode
from hetu_fx.graph.containers import Entries, Items, TensorSlot, Tree, unflatten, walk
from hetu_fx.graph.edit import ancestors
from hetu_fx.graph.graph import OBSERVED, Graph, Leaf, LeafKind, OutputKind
from hetu_fx.program.captures import Programs
from hetu_fx.program.program import Program
from hetu_fx.switching.runtime import Runtime

MODES = ("training", "evaluation", "inference")


@dataclass(frozen=True)
class Single:
    """The graphs that there are by mode, and why the others are not there."""

    graphs: Mapping[str, Graph]
    missing: Mapping[str, str]


def _single_graphs(programs: Programs) -> Single:
    """Capture the model as it was in its last training step, in every mode that it can be.

    Raises:
        ExportError: the model has changed since its last training step.
        CaptureError: it cannot be captured for training.
    """
    program = programs.training
    _check_unchanged(programs, program)
    batch = _example_batch(program.graph)
    graphs, missing = {"training": _training(programs.source(batch, True, program))}, {}
    try:
        graphs["evaluation"] = _training(programs.source(batch, False, program))
    except HetuFxError as error:
        missing["evaluation"] = f"the forward cannot be captured in evaluation mode: {error}"
    try:
        graphs["inference"] = _inference(programs, program, graphs.get("evaluation", graphs["training"]))
    except HetuFxError as error:
        missing["inference"] = str(error)
    return Single(graphs, missing)


def _check_unchanged(programs: Programs, program: Program) -> None:
    with in_mode(programs.model, True):
        if not programs.holds(program):
            raise ExportError(
                "the model has changed since its last training batch, so its device graphs are not those of the model "
                "as it is now\nhint: run a training batch (model.train(), then model(**batch)) and export after it"
            )


def _example_batch(graph: Graph) -> Batch:
    """Return a batch of zeros of the sizes that the graph was captured with."""
    tensors = {leaf.name: _zeros(leaf) for leaf in graph.leaves_of(LeafKind.INPUT)}
    batch: Batch = unflatten(graph.input_tree, tensors)
    return batch


def _zeros(leaf: Leaf) -> Tensor:
    example = meta.value(leaf.node)
    return torch.zeros(meta.hints(leaf.node), dtype=example.dtype, device=example.device)


def _training(graph: Graph) -> Graph:
    return graph.select(lambda leaf: leaf.kind is not OutputKind.CHECK and not leaf.name.startswith(OBSERVED))


def _inference(programs: Programs, program: Program, evaluation: Graph) -> Graph:
    """Capture the forward without the inputs that only its loss reads.

    Raises:
        ExportError: it makes nothing but a loss, or does not run without them.
    """
    outputs = [node for leaf, node in evaluation.outputs_of(OutputKind.VALUE)]
    if not outputs:
        raise ExportError("the model returns nothing but its loss, so that there is nothing to infer")
    read = ancestors(outputs, _read_values)
    labels = [leaf.name for leaf in evaluation.leaves_of(LeafKind.INPUT) if leaf.node not in read]
    batch = _without_inputs(_example_batch(evaluation), evaluation.input_tree, labels)
    try:
        graph = programs.source(batch, False, program)
    except CaptureError as error:
        raise ExportError(f"the forward does not run without {', '.join(labels)}: {error}") from error
    return _named(graph.select(lambda leaf: leaf.kind is OutputKind.VALUE and not leaf.name.startswith(OBSERVED)))


def _read_values(node: fx.Node) -> Iterable[fx.Node]:
    """Return what a node is made of; a size of the batch is the same for all inputs."""
    return () if node.target is torch.ops.aten.sym_size.int else node.all_input_nodes


def _named(graph: Graph) -> Graph:
    if not graph.outputs:
        raise ExportError("the model returns nothing without its labels")
    return graph


def _without_inputs(batch: Batch, tree: Tree, names: list[str]) -> Batch:
    """Return a batch without the keyword arguments all of whose tensors are among these."""
    if not isinstance(tree, Entries) or not isinstance(batch, Mapping):
        return batch
    slots = {key: _tensors(child) for key, child in zip(tree.keys, tree.children, strict=True)}
    return {key: value for key, value in batch.items() if not slots[key] or not slots[key] <= set(names)}


def _tensors(tree: Tree) -> set[str]:
    return {leaf.name for leaf in walk(tree) if isinstance(leaf, TensorSlot)}


def make_runnable(graph: Graph, model: nn.Module) -> Runnable:
    """Return what a `.pt2` is made of, for a captured graph of a model."""
    places = tuple(_place(leaf, model) for leaf in graph.leaves)
    names = frozenset(leaf.name for leaf in graph.leaves_of(LeafKind.INPUT))
    results = tuple(Result(leaf.name or "output", leaf.kind is OutputKind.BUFFER_UPDATE) for leaf in graph.outputs)
    tree = plain_tree(graph.input_tree, names)
    assert isinstance(tree, Entries | Items)
    return Runnable(graph.graph, places, results, tree)


def _place(leaf: Leaf, model: nn.Module) -> Place:
    shape = meta.hints(leaf.node)
    if leaf.kind is LeafKind.INPUT:
        return Argument(leaf.name, leaf.node, shape)
    if leaf.kind is LeafKind.PARAMETER:
        return StateSlot(leaf.name, leaf.node, shape, True, model.get_parameter(leaf.name).requires_grad)
    return StateSlot(leaf.name, leaf.node, shape, False, is_saved=leaf.kind is LeafKind.BUFFER and leaf.persistent)


def _held_values(graph: Graph, model: nn.Module) -> dict[str, Tensor]:
    """Return the values of buffers and constants that a graph reads, on the cpu, each with memory of its own."""
    found: dict[str, Any] = dict(graph.constants)
    found |= {leaf.name: model.get_buffer(leaf.name) for leaf in graph.leaves_of(LeafKind.BUFFER)}
    return dict(_on_cpu(found))


def _on_cpu(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        yield name, tensor.detach().to("cpu", copy=True).contiguous()


FOLDER, WEIGHTS = "single", "weights"


def write_single(runtime: Runtime, programs: Programs, aside: Path, *, weights: bool, onnx: bool) -> dict[str, Any]:
    """Write the graphs on rank 0, and return what the manifest says of them there; collective.

    With `onnx`, the one for inference as ONNX, too.
    """
    table, homes = runtime.table, runtime.homes
    single = raise_on_all_ranks(table, lambda: _single_graphs(programs) if table.rank == 0 else None)
    values = _gather_on_first(homes, table) if weights else {}
    entries = raise_on_all_ranks(table, lambda: _write(single, runtime.model, values, aside, onnx) if single else {})
    return {"graphs": entries, "tied": tied_names(runtime.model)}


def write_weight_files(runtime: Runtime, aside: Path) -> dict[str, Any]:
    """Write the weights in safetensors files; returns where each is. Collective."""
    folder, limit = aside / WEIGHTS, parse_size(MAX_SHARD_SIZE)
    raise_on_all_ranks(runtime.table, lambda: folder.mkdir() if runtime.table.rank == 0 else None)
    raise_on_all_ranks(runtime.table, lambda: write_weights(folder, runtime.homes, limit, runtime.table))
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
    runnable, title = make_runnable(graph, model), f"the single-device graph for {path.stem}"
    exported = export_runnable(runnable, {**values, **_held_values(graph, model)}, title)
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


MESSAGE_BYTES = 64 << 20  # of weights that travel at once: as much again is needed meanwhile


def _gather_on_first(tensors: Mapping[str, Tensor], table: GroupTable) -> dict[str, Tensor]:
    """Return whole tensors in host memory on rank 0, nothing elsewhere; collective.

    Raises:
        ExportError: on every rank, where rank 0 has no room for them.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    needed = sum(sizes) + max([*sizes, min(sum(sizes), MESSAGE_BYTES)])  # a file is written a tensor at a time
    whole = "the single-device graphs on rank 0"
    raise_on_all_ranks(table, lambda: check_room(needed, whole) if table.rank == 0 else None)
    found: dict[str, Tensor] = {}
    for names in plan_shards(tensors, MESSAGE_BYTES).values():
        found |= bring_to_first({name: tensors[name].detach() for name in names}, table)
    return found


def check_room(needed: int, what: str) -> None:
    """Refuse to gather weights for which this rank has no room.

    Raises:
        ExportError: says how many bytes are needed, and how many are left.
    """
    short = [f"{size} bytes are left of {name!r}" for name, size in memory_left(torch.device("cpu")) if size < needed]
    if short:
        raise ExportError(
            f"{what} need {needed} bytes of host memory for the weights, but {'; '.join(short)}"
            f"\nhint: free memory there, or "
            f"export with weights=False, which writes them in safetensors files next to the graphs, a few at a time"
        )
