"""What a `.pt2` of one rank's device graph is made of: its slots by name, and this rank's parts of the weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from hetu_fx.checkpoint.tensor_files import plan_shards
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.consensus import together
from hetu_fx.export.runnable import Argument, Place, Result, Runnable, State
from hetu_fx.export.weights import MESSAGE_BYTES, check_room
from hetu_fx.graph import meta
from hetu_fx.graph.containers import Entries, TensorSlot
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.switching.home.ops import layout_of, pieces_of
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.step.compiled_plans import StagePlan
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, GraphSlot, ResultKind, SlotKind

STATES = (SlotKind.PARAMETER, SlotKind.BUFFER, SlotKind.CONSTANT)


@dataclass(frozen=True)
class Named:
    """A slot or a result, and the name that callers have for it."""

    name: str
    kind: str
    model_name: str


def parts_of(runtime: Runtime, deduced: DeducedGraph) -> dict[str, Tensor]:
    """Return this rank's parts of the parameters, as the graph reads them; collective.

    Raises:
        ExportError: on every rank, where one has no room for them.
    """
    table, leaves = runtime.table, {leaf.name: leaf for leaf in deduced.parameters()}
    homes: dict[str, Any] = {name: runtime.homes[name] for name in leaves}
    own = pieces_of(homes)
    targets = {name: deduced.parameter_annotations(leaf)[0] for name, leaf in leaves.items()}
    moves = {
        name: TensorMove(layout_of(home).annotation, targets[name], tuple(home.shape), home.element_size())
        for name, home in homes.items()
    }
    together(table, lambda: check_room(_bytes_here(moves, table.rank), f"the parts of rank {table.rank}"))
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


def device_runnable(stage: StagePlan, device: DeviceGraph, model: nn.Module) -> Runnable:
    """Return what a `.pt2` is made of, for a graph that one rank runs."""
    places = tuple(
        _place(stage, device, slot, name, model) for slot, name in zip(device.slots, slots_of(device), strict=True)
    )
    updated = {place.name: place.shape for place in places if isinstance(place, State) and not place.is_parameter}
    results = tuple(
        Result(result.model_name if in_place else result.name, in_place)
        for result in results_of(device)
        for in_place in [_fits(stage, device.rank, result, updated)]
    )
    names = tuple(place.name for place in places if isinstance(place, Argument))
    return Runnable(device.graph, places, results, Entries(dict, names, tuple(map(TensorSlot, names))))


def _fits(stage: StagePlan, rank: int, result: Named, buffers: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether a result is the new value of a buffer that lies here as the graph reads it."""
    if result.kind != ResultKind.BUFFER_UPDATE or result.model_name not in buffers:
        return False
    at = stage.updates[result.model_name]
    return at.holds(rank) and at == stage.buffers[result.model_name]


def _place(stage: StagePlan, device: DeviceGraph, slot: GraphSlot, named: Named, model: nn.Module) -> Place:
    node = slot_node(stage.deduced.annotated.graph, slot)
    shape = _local_hints(stage.deduced, device, node)
    if slot.kind not in STATES:
        return Argument(named.name, node, shape)
    if slot.kind is SlotKind.PARAMETER:
        return State(slot.name, node, shape, True, model.get_parameter(slot.name).requires_grad)
    saved = {leaf.name for leaf in stage.deduced.annotated.graph.leaves_of(LeafKind.BUFFER) if leaf.persistent}
    return State(slot.name, node, shape, False, is_saved=slot.kind is SlotKind.BUFFER and slot.name in saved)


def slots_of(device: DeviceGraph) -> list[Named]:
    """Return what the graph reads, in its order: what the caller gives has the name of a keyword."""
    given = [slot for slot in device.slots if slot.kind not in STATES]
    words = dict(zip(given, _unlike(slot.name for slot in given), strict=True))
    return [Named(words.get(slot, slot.name), slot.kind.value, slot.name) for slot in device.slots]


def results_of(device: DeviceGraph) -> list[Named]:
    """Return what the graph makes, in its order."""
    names = _unlike((result.name or "output" for result in device.results), keywords=False)
    return [Named(name, result.kind.value, result.name) for name, result in zip(names, device.results, strict=True)]


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


def slot_node(graph: Graph, slot: GraphSlot) -> fx.Node:
    """Return the node of the whole graph that a slot of a device graph stands for."""
    if slot.kind is SlotKind.RECEIVED:
        nodes: Iterable[fx.Node] = graph.graph.nodes
        return next(node for node in nodes if node.name == slot.name)
    return next(leaf.node for leaf in graph.leaves if (leaf.kind.value, leaf.name) == (slot.kind.value, slot.name))
