"""Which repeated blocks a trial keeps: one of each kind in every run of blocks that the plan treats alike.

And the captured program without the others, as the small model has it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from hetu_fx.base.torch_private import FakeTensor, OpOverload, fake_of_form, tree_leaves, tree_map
from hetu_fx.check.model import Narrowing, in_dtype
from hetu_fx.graph import meta
from hetu_fx.graph.calls import arguments
from hetu_fx.graph.graph import Graph, drop_dead_nodes
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.plan import Pipeline, Plan
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.analysed_graph import Analyse
from hetu_fx.transforms.passes import run_pass

LEAST_OF_CHAIN = 2
"""Blocks are found by numbers that follow each other: of one alone nobody knows that it is a block."""

_SITE = "site"  # of a random op: which of the graph's it is


def kinds_of_blocks(graph: Graph) -> tuple[str, ...]:
    """Return a digest for each block; equal ones have the same ops on values of the same form."""
    lines: dict[int, list[str]] = {index: [] for index in range(graph.num_blocks)}
    for node in graph.graph.nodes:
        index = graph.block_of(node) if node.op == "call_function" else None
        if index is not None:
            lines[index].append(_form(node))
    return tuple(hashlib.sha256("\n".join(lines[index]).encode()).hexdigest() for index in lines)


def _form(node: fx.Node) -> str:
    """Return what an op is, whatever the names of its arguments: their sizes and dtypes, and its constants."""
    given: Any = (node.args, node.kwargs)
    if isinstance(node.target, OpOverload):
        given = {name: value for name, value in arguments(node).items() if name != _SITE}
    constants = [leaf for leaf in tree_leaves(given) if not isinstance(leaf, fx.Node)]
    operands = [_size(other) for other in node.all_input_nodes]
    return f"{node.target} {constants} {operands}"


def _size(node: fx.Node) -> str:
    return f"{meta.shape(node)} {meta.dtype(node)}" if meta.is_tensor(node) else "number"


@dataclass(frozen=True)
class KeptBlocks:
    """The blocks of a model that a trial keeps.

    Attributes:
        paths: of all blocks, in order of execution.
        kept: the places, among them, of those that are kept, in order.
    """

    paths: tuple[str, ...]
    kept: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, graph: Graph) -> KeptBlocks:
        """Choose of a model's blocks what its stages under a plan have of each kind.

        All of them for a plan whose stages say op by op what they cut.
        """
        paths, total = graph.block_paths, graph.num_blocks
        if plan.has_program or not total:
            return cls(paths, tuple(range(total)))
        kinds = kinds_of_blocks(graph)
        first = {(run.start, kinds[i]): i for run in _runs(plan, total) for i in reversed(run)}
        return cls(paths, tuple(_completed(paths, set(first.values()))))

    @property
    def is_all(self) -> bool:
        """Tell whether nothing is left out."""
        return len(self.kept) == len(self.paths)

    def all(self) -> KeptBlocks:
        """Return the same with no block left out."""
        return replace(self, kept=tuple(range(len(self.paths))))

    def told(self) -> str:
        """Say how many blocks are kept, if any are left out."""
        return "" if self.is_all else f"{len(self.kept)} of {len(self.paths)} blocks, "

    @property
    def dropped_blocks(self) -> frozenset[str]:
        """Return the paths of the blocks that are left out."""
        return frozenset(path for place, path in enumerate(self.paths) if place not in self.kept)

    def count(self, start: int, stop: int) -> int:
        """Return how many of the blocks [start, stop) are kept."""
        return sum(start <= place < stop for place in self.kept)

    def plan(self, plan: Plan) -> Plan:
        """Return a plan for the blocks that are kept: every stage has those that it had."""
        if self.is_all:
            return plan
        parts = plan.parts(len(self.paths))
        return replace(plan, pipelines=tuple(self._pipeline(*pair) for pair in zip(plan.pipelines, parts, strict=True)))

    def _pipeline(self, pipeline: Pipeline, parted: PartedPipeline) -> Pipeline:
        held = [parted.deal.held(stage) for stage in range(len(pipeline.stages))]
        ranges = list(parted.ranges)
        blocks = [sum(self.count(*ranges[part]) for part in parts) for parts in held]
        again = [sum(self.count(found.start, found.stop) for found in map(parted.recomputed, parts)) for parts in held]
        stages = zip(pipeline.stages, blocks, again, strict=True)
        return replace(
            pipeline,
            stages=tuple(
                replace(stage.recomputing(few, stage.recompute_ops), blocks=own) for stage, own, few in stages
            ),
        )

    def original_names(self) -> Mapping[str, str]:
        """Return the paths of the kept blocks in the model, by those that they have in the shortened one."""
        found, numbers = dict[str, str](), dict[str, int]()
        dropped = self.dropped_blocks
        for path in sorted(self.paths, key=_number):
            parent = path.rpartition(".")[0]
            first = min(_number(other) for other in self.paths if other.rpartition(".")[0] == parent)
            place = numbers.setdefault(parent, first)
            if path not in dropped:
                found[f"{parent}.{place}" if parent else str(place)] = path
                numbers[parent] = place + 1
        return found


def _runs(plan: Plan, total: int) -> Iterator[range]:
    """Yield the longest runs of blocks that no part of any pipeline begins, ends or stops recomputing inside of."""
    stops = {0, total}
    for pipeline in plan.parts(total):
        stops.update(pipeline.stops)
        stops.update(pipeline.recomputed(part).stop for part in range(len(pipeline.parts)))
    yield from (range(start, stop) for start, stop in pairwise(sorted(stops)))


def _completed(paths: Sequence[str], kept: set[int]) -> list[int]:
    """Return what is kept, in order, with so many of each chain that it is still found."""
    chains: dict[str, list[int]] = {}
    for place, path in enumerate(paths):
        chains.setdefault(path.rpartition(".")[0], []).append(place)
    for chain in chains.values():
        missing = LEAST_OF_CHAIN - len(kept.intersection(chain))
        kept |= set([place for place in chain if place not in kept][: max(0, missing)])
    return sorted(kept)


def _number(path: str) -> int:
    return int(path.rpartition(".")[2])


def recast_program(program: Program, blocks: KeptBlocks, narrowing: Narrowing, dtype: torch.dtype) -> Program:
    """Return a program as a model without some blocks, with short tables and in another dtype, would be captured.

    In a fraction of the time, and not for sure: what the model itself casts, and numbers that it makes of sizes, stay.

    Raises:
        ValueError: a block that is left out is no link of a chain; a leaf is called, which belongs to the whole model;
            the model computes in several dtypes.
    """
    if program.graph.leaf_calls or len(set(map(meta.dtype, filter(meta.is_tensor, program.flow.differentiable)))) > 1:
        raise ValueError("it calls modules of the whole model, or casts")
    dropped, paths = tuple(f"{path}." for path in blocks.dropped_blocks), blocks.original_names().items()

    def names(name: str) -> str:
        found = ((new, path) for new, path in paths if f"{name}.".startswith(f"{path}."))
        return next((new + name.removeprefix(path) for new, path in found), name)

    graph = program.graph.select(lambda leaf: not leaf.name.startswith(dropped))
    _skip_blocks(graph, set(range(graph.num_blocks)).difference(blocks.kept))
    for node in graph.graph.nodes:
        meta.set_module_stack(node, tuple((names(path), kind) for path, kind in meta.module_stack(node)))
        node.args = fx.node.map_aggregate(node.args, narrowing.size)
        if meta.has_value(node):
            meta.set_value(node, tree_map(partial(_recast, narrowing, dtype), meta.value(node)))
    left = [leaf for leaf in graph.leaves if not leaf.name.startswith(dropped)]
    for leaf in set(graph.leaves).difference(left):
        graph.graph.erase_node(leaf.node)
    trained = {leaf.name for leaf in program.graph.leaves if leaf.node in program.flow.differentiable}
    cut = graph.evolve(
        leaves=tuple(replace(leaf, name=names(leaf.name), aliases=tuple(map(names, leaf.aliases))) for leaf in left),
        outputs=tuple(replace(leaf, name=names(leaf.name)) for leaf in graph.outputs),
        block_paths=tuple(names(graph.block_paths[place]) for place in blocks.kept),
        constants={name: in_dtype(narrowing.buffer(tensor), dtype) for name, tensor in graph.constants.items()},
    )
    frozen = frozenset(names(leaf.name) for leaf in left if leaf.name not in trained)
    return Program(run_pass(Analyse(frozen), cut), program.doubt)


def _recast(narrowing: Narrowing, dtype: torch.dtype, example: Any) -> Any:
    """Return an example value as it is in the new sizes and dtype, without running what makes it."""
    made = in_dtype(torch.empty(0, dtype=example.dtype), dtype).dtype if isinstance(example, FakeTensor) else None
    if made is None or (made == example.dtype and not narrowing.sizes):
        return example
    sizes, strides = (tuple(map(narrowing.size, of)) for of in (example.shape, example.stride()))
    enough = example.untyped_storage().nbytes() * made.itemsize
    return fake_of_form(example.fake_mode, sizes, strides, 0, made, example.device, enough)


def _skip_blocks(graph: Graph, places: Collection[int]) -> None:
    """Let what reads a block read what the block before it has made. Raises ValueError where that is not one value."""
    place_of = {node: graph.block_of(node) for node in graph.graph.nodes}
    for place in sorted(places, reverse=True):
        own = {node for node in place_of if place_of[node] == place}
        (made,) = (node for node in own if not own.issuperset(node.users))
        (given,) = {one for node in own for one in node.all_input_nodes if place_of[one] == place - 1}
        made.replace_all_uses_with(given)
    drop_dead_nodes(graph.graph)


def same_ops(whole: Graph, cut: Graph, blocks: KeptBlocks) -> bool:
    """Tell whether a graph has the ops of another one without some blocks; sizes and casts aside."""
    dropped = {place for place in range(whole.num_blocks) if place not in blocks.kept}
    return list(_ops(whole, dropped)) == list(_ops(cut, frozenset()))


def _ops(graph: Graph, dropped: Collection[int]) -> Iterator[str]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and meta.is_tensor(node) and graph.block_of(node) not in dropped:
            operands = [meta.dtype(other) for other in node.all_input_nodes if meta.is_tensor(other)]
            if len(operands) != 1 or operands[0] == meta.dtype(node):
                yield str(node.target)
