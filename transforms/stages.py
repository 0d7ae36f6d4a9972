"""The stages of a graph on its way to a device; a pass takes one type and returns the next.

    Graph -> AnnotatedGraph -> DeducedGraph -> DeviceGraph

This module has the second, and what a pipeline stage consists of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from hetu_fx.deduction.factors import FactorClass, FactorMap
from hetu_fx.graph.graph import Graph, OutputKind, OutputLeaf
from hetu_fx.plans import Plan
from hetu_fx.transforms.flow import Flow


@dataclass(frozen=True, eq=False)
class StageLayout:
    """One pipeline stage: its devices, and the part of every split class that each of them has.

    Of a class whose size only the run tells, `sizes` has the devices' shares. Devices that share the sequence split
    it alone, whatever the classes that tensor parallel stages split.
    """

    pipeline: int
    index: int
    devices: tuple[int, ...]
    sizes: Mapping[FactorClass, tuple[int, ...]]
    shares_sequence: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Return (pipeline, stage index)."""
        return self.pipeline, self.index


@dataclass(frozen=True, eq=False)
class AnnotatedGraph:
    """A graph with a plan put on it: which classes are split where, and which stage each op belongs to.

    Attributes:
        wants_values: outputs other than the loss are computed too.
        classes: factor classes that tensor-parallel stages split.
        sequence: those that they split where they can split none of `classes`, and that context parallel stages
            split throughout.
        stages: layouts by pipeline, then by stage.
        stage_of: for each pipeline, the stage of every op that belongs to one.
    """

    graph: Graph
    factors: FactorMap
    flow: Flow
    plan: Plan
    wants_values: bool
    classes: frozenset[FactorClass]
    sequence: frozenset[FactorClass]
    stages: tuple[tuple[StageLayout, ...], ...]
    stage_of: tuple[Mapping[fx.Node, int], ...]

    @property
    def layouts(self) -> tuple[StageLayout, ...]:
        """Return all stage layouts, pipeline after pipeline."""
        return tuple(layout for pipeline in self.stages for layout in pipeline)

    @property
    def context_layouts(self) -> tuple[StageLayout, ...]:
        """Return those whose devices share the sequence."""
        return tuple(layout for layout in self.layouts if layout.shares_sequence)

    @property
    def splits_batch(self) -> bool:
        """Tell whether rows are spread over pipelines or micro-batches."""
        pipelines = self.plan.pipelines
        return len(pipelines) > 1 or any(pipeline.micro_batches > 1 for pipeline in pipelines)

    @property
    def runs_in_step(self) -> bool:
        """Tell whether all replicas run one stage and one micro-batch, so that ops can talk across replicas."""
        return all(len(p.stages) == 1 and p.micro_batches == 1 for p in self.plan.pipelines)


@dataclass(frozen=True)
class StageNodes:
    """What one stage computes.

    Attributes:
        needed: all nodes that the stage's graph has, leaves and copies of shared ones included.
        received: values of earlier stages that it reads.
        sent: its values that later stages read.
        outputs: positions in the graph's outputs that this stage makes.
    """

    needed: frozenset[fx.Node]
    received: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]
    outputs: tuple[int, ...]


def stage_nodes(annotated: AnnotatedGraph, layout: StageLayout) -> StageNodes:
    """Return what the stage computes, reads from earlier stages and makes for later ones."""
    stage_of, index = annotated.stage_of[layout.pipeline], layout.index
    last = len(annotated.stages[layout.pipeline]) - 1
    sent = tuple(
        node
        for node, stage in stage_of.items()
        if stage == index and any(stage_of.get(user, index) > index for user in node.users)
    )
    outputs = tuple(
        i
        for i, (leaf, node) in enumerate(zip(annotated.graph.outputs, annotated.graph.output_values, strict=True))
        if stage_of.get(node, last) == index and _is_made(leaf, annotated.wants_values)
    )
    roots = [*sent, *(annotated.graph.output_values[i] for i in outputs)]
    needed, received = _closure(roots, stage_of, index)
    order = {node: i for i, node in enumerate(annotated.graph.graph.nodes)}
    return StageNodes(needed, tuple(sorted(received, key=order.__getitem__)), sent, outputs)


def _is_made(leaf: OutputLeaf, wants_values: bool) -> bool:
    """Tell whether a stage makes this output; counts are made by the prologue."""
    if leaf.kind is OutputKind.VALUE:
        return wants_values
    return leaf.kind is not OutputKind.COUNT


def _closure(
    roots: list[fx.Node], stage_of: Mapping[fx.Node, int], index: int
) -> tuple[frozenset[fx.Node], set[fx.Node]]:
    needed: set[fx.Node] = set()
    received: set[fx.Node] = set()
    queue = list(roots)
    while queue:
        node = queue.pop()
        if stage_of.get(node, index) < index:
            received.add(node)
        elif node not in needed:
            needed.add(node)
            queue.extend(node.all_input_nodes)
    return frozenset(needed), received
