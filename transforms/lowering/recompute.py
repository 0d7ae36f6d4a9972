"""Choose what a device computes again in backward, instead of keeping it from forward.

An op that sends is in no run: its result is kept. Sent again, it would take the time of the links once more, and all
ranks would have to come back to it in the same order. Nor is one that draws from torch's generator, which would draw
other numbers. A block is cut into as few runs as these allow: in each is what has waited for equally many of them. They
keep their order, so that ranks meet whichever of them recompute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.blocks import block_index
from hetu_fx.graph.calls import draws
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph
from hetu_fx.transforms.lowering.graph_traffic import communications, sends
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, SlotKind

Run = tuple[fx.Node, ...]


@dataclass(frozen=True)
class Recompute:
    """Find what a device computes again in backward; orders the graph in place.

    Requires: a device graph.
    Ensures: the ops of the blocks that the rank's stage recomputes stand in runs, one after another in the graph. What
        enters a run is kept, what it makes for itself alone is not (Chen et al., Training Deep Nets with Sublinear
        Memory Cost, section 4), but for what ops make that the stage does not recompute.

        %v = aten.linear(%x, %w_v)                         %v = aten.linear(%x, %w_v)                  } a run
        %whole_v = hetu.all_gather(%v, ...)          ->    %a = aten.softmax(aten.linear(%x, %w_a))    }
        %a = aten.softmax(aten.linear(%x, %w_a))           %whole_v = hetu.all_gather(%v, ...)
        %y = aten.matmul(%a, %whole_v)                     %y = aten.matmul(%a, %whole_v)              } the next run
    """

    annotated: AnnotatedGraph
    name: ClassVar[str] = "recompute"

    def __call__(self, device: DeviceGraph) -> DeviceGraph:
        pipeline, index = device.layout.key
        wanted = self.annotated.pipelines[pipeline].recomputed(index)
        if not wanted:
            return device
        nodes = [node for node in device.graph.nodes if node.op == "call_function"]
        talks = frozenset(communications(device))
        blocks = _blocks(nodes, self.annotated.graph.block_paths, talks)
        spans = [tuple(span) for block, span in groupby(nodes, key=blocks.__getitem__) if block in wanted]
        weights = _weights(device)
        runs = tuple(run for span in spans for run in _runs(span, talks, weights))
        ops = self.annotated.stage(device.layout).recompute_ops
        return replace(device, recomputed=runs, recomputed_ops=ops)


def _blocks(nodes: Sequence[fx.Node], paths: Sequence[str], talks: frozenset[fx.Node]) -> dict[fx.Node, int | None]:
    """Return the block that each op is recomputed with.

    Communication that sends nothing forward stands before its first reader, and goes with it: a copy that only marks
    where gradients are summed need not be kept beside what it is a copy of. What is in no block, amid one, goes
    with that.
    """
    blocks: dict[fx.Node, int | None] = {}
    after: int | None = None
    for node in reversed(nodes):
        own = block_index(meta.module_stack(node), paths)
        blocks[node] = after = after if node in talks and not sends(node) else own
    return _filled(nodes, blocks)


def _filled(nodes: Sequence[fx.Node], blocks: dict[fx.Node, int | None]) -> dict[fx.Node, int | None]:
    before: int | None = None
    gap: list[fx.Node] = []
    for node in nodes:
        if blocks[node] is None:
            gap.append(node)
            continue
        if blocks[node] == before:
            blocks.update(dict.fromkeys(gap, before))
        before, gap = blocks[node], []
    return blocks


def _weights(device: DeviceGraph) -> frozenset[fx.Node]:
    leaves = zip(device.graph.find_nodes(op="placeholder"), device.slots, strict=True)
    return frozenset(node for node, slot in leaves if slot.kind is SlotKind.PARAMETER)


def _runs(span: Sequence[fx.Node], talks: frozenset[fx.Node], weights: frozenset[fx.Node]) -> Iterator[Run]:
    """Order the ops of one block, and give those that can be run again without a message in between, run by run."""
    kept = frozenset(node for node in span if _is_kept(node))
    levels = number_segments(span, kept, weights, talks)
    before = span[0].prev
    for node in sorted(span, key=lambda node: (levels[node], node in kept)):
        before.append(node)
        before = node
    for level in range(max(levels.values()) + 1):
        run = tuple(node for node in span if levels[node] == level and node not in kept)
        if run:
            yield run


def _is_kept(node: fx.Node) -> bool:
    return sends(node) or draws(node)


def number_segments(
    span: Sequence[fx.Node],
    kept: frozenset[fx.Node],
    weights: frozenset[fx.Node],
    talks: frozenset[fx.Node] = frozenset(),
) -> dict[fx.Node, int]:
    """Return the number of the run that each op of a block goes with: how many results it waits for, one after another.

    Args:
        span: the block's ops.
        kept: those whose results are kept, so that none stands in a run.
        weights: the parameters; what is made of them alone goes with what reads it.
        talks: communication, which waits for what is before it.
    """
    return _sunk(_levels(span, kept, talks), kept | talks, weights)


def _levels(span: Sequence[fx.Node], kept: frozenset[fx.Node], talks: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """Return how many of `kept` each op has to wait for, one after another; communication waits for what is before."""
    levels: dict[fx.Node, int] = {}
    last, ended = 0, 0
    for node in span:
        inputs = [levels[n] + (n in kept) for n in node.all_input_nodes if n in levels]
        levels[node] = max([0, *inputs])
        if node in kept:
            last = levels[node] = max(levels[node], last)
            ended = last + 1
        elif node in talks:
            last = levels[node] = max(levels[node], last, ended)
    return levels


def _sunk(levels: dict[fx.Node, int], fixed: frozenset[fx.Node], weights: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """Move what is made of weights alone (casts of them) to the run that reads it, so that it is not kept for that."""
    made = set(weights)
    for node in levels:
        if node not in fixed and node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
    sunk = dict(levels)
    for node in reversed(levels):
        if node in made and node.users and levels.keys() >= node.users.keys():
            sunk[node] = min(sunk[user] for user in node.users)
    return sunk
