"""The stages of a graph on its way to a device; a pass takes one type and returns the next.

Graph -> AnnotatedGraph -> DeducedGraph -> DeviceGraph
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import sympy
import torch
from torch import fx

from hetu_fx.annotations.annotation import (
    Annotation,
    DeviceGroup,
    Duplicate,
    Partial,
    Shape,
    Sharding,
    Split,
    State,
)
from hetu_fx.deduction.factors import FactorClass, FactorMap
from hetu_fx.errors import DeductionError, PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, Leaf, LeafKind, OutputKind, OutputLeaf
from hetu_fx.plan import Plan
from hetu_fx.transforms.axis import AxisDeduction
from hetu_fx.transforms.flow import Flow
from hetu_fx.transforms.states import AxisState, SplitOn, Summed, Whole

LogicalShape = tuple[int | sympy.Expr, ...]


@dataclass(frozen=True, eq=False)
class StageLayout:
    """One pipeline stage: its devices, and the part of every split class that each of them has."""

    pipeline: int
    index: int
    devices: tuple[int, ...]
    sizes: Mapping[FactorClass, tuple[int, ...]]

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
        stages: layouts by pipeline, then by stage.
        stage_of: for each pipeline, the stage of every op that belongs to one.
    """

    graph: Graph
    factors: FactorMap
    flow: Flow
    plan: Plan
    wants_values: bool
    classes: frozenset[FactorClass]
    stages: tuple[tuple[StageLayout, ...], ...]
    stage_of: tuple[Mapping[fx.Node, int], ...]

    @property
    def layouts(self) -> tuple[StageLayout, ...]:
        """Return all stage layouts, pipeline after pipeline."""
        return tuple(layout for pipeline in self.stages for layout in pipeline)

    @property
    def splits_batch(self) -> bool:
        """Tell whether rows are spread over pipelines or micro-batches."""
        pipelines = self.plan.pipelines
        return len(pipelines) > 1 or any(pipeline.micro_batches > 1 for pipeline in pipelines)

    @property
    def runs_in_step(self) -> bool:
        """Tell whether all replicas run one stage and one micro-batch, so that ops can talk across replicas."""
        return all(len(p.stages) == 1 and p.micro_batches == 1 for p in self.plan.pipelines)


@dataclass(frozen=True, eq=False)
class DeducedGraph:
    """An annotated graph whose every value has a state on both axes; the same for all devices."""

    annotated: AnnotatedGraph
    batch: AxisDeduction
    tensor_split: AxisDeduction
    tensor_whole: AxisDeduction

    def tensor(self, layout: StageLayout) -> AxisDeduction:
        """Return the deduction of the tensor axis inside a stage."""
        return self.tensor_split if len(layout.devices) > 1 else self.tensor_whole

    def shape(self, node: fx.Node) -> Shape:
        """Return a value's shape; symbolic sizes are None."""
        return tuple(None if meta.is_symbolic(size) else int(size) for size in meta.shape(node))

    def axis(self, node: fx.Node, state: AxisState, layout: StageLayout) -> State:
        """Return the annotation's axis for a value in `state` on the devices of a stage."""
        ways = len(layout.devices)
        match state:
            case Whole():
                return Duplicate(ways)
            case Summed():
                return Partial(ways)
            case SplitOn(factor):
                return self._split(node, factor, layout)

    def _split(self, node: fx.Node, factor: FactorClass, layout: StageLayout) -> Split:
        dims = self.annotated.factors.dims(node)
        dim = next(i for i, classes in enumerate(dims) if factor in classes)
        outer, inner = self.annotated.factors.sub_factor(node, dim, factor)
        if outer is None or inner is None:
            raise DeductionError(
                f"dim {dim} of '{node.name}' ({meta.source_line(node)}) mixes rows or positions with a dimension that "
                f"the plan splits over devices {list(layout.devices)}; use a plan without tensor parallelism there"
            )
        return Split(dim, layout.sizes[factor], outer, inner)

    def annotation(self, node: fx.Node, state: AxisState, layout: StageLayout) -> Annotation:
        """Return where a value in `state` lies within one stage."""
        return Annotation.on(layout.devices, self.axis(node, state, layout))

    def value_annotation(self, node: fx.Node, layout: StageLayout) -> Annotation:
        """Return where a value lies within one stage once it can be read."""
        return self.annotation(node, self.tensor(layout).states[node], layout)

    def across(self, node: fx.Node, layouts: tuple[StageLayout, ...], top: str, summed: bool = False) -> Annotation:
        """Return a value's annotation over several stages, one group each.

        `top` is "duplicate" or "partial"; with `summed`, a stage in which nothing sums the value's cotangent is
        partial inside too.
        """
        axes = [self._across_axis(node, layout, summed) for layout in layouts]
        groups = tuple(DeviceGroup(layout.devices) for layout in layouts)
        ways = len(layouts)
        kind: State | None = None if ways == 1 else Duplicate(ways) if top == "duplicate" else Partial(ways)
        return Annotation(groups, tuple(Sharding((axis,)) for axis in axes), kind)

    def _across_axis(self, node: fx.Node, layout: StageLayout, summed: bool) -> State:
        deduction = self.tensor(layout)
        if summed and node in deduction.summed_cotangents:
            return Partial(len(layout.devices))
        return self.axis(node, deduction.states[node], layout)

    def across_states(
        self, node: fx.Node, states: tuple[AxisState, ...], layouts: tuple[StageLayout, ...], top: str
    ) -> Annotation:
        """Return the annotation over several stages of a value that is in one of `states` inside each."""
        groups = tuple(DeviceGroup(layout.devices) for layout in layouts)
        axes = [self.axis(node, state, layout) for state, layout in zip(states, layouts, strict=True)]
        kind = Duplicate(len(layouts)) if top == "duplicate" else Partial(len(layouts))
        return Annotation(groups, tuple(Sharding((axis,)) for axis in axes), kind)

    def parameter_annotations(self, leaf: Leaf) -> tuple[Annotation, Annotation]:
        """Return where a parameter lies when it is read, and where its gradient lies before it is synchronised.

        Replicas, and stages that share a tied parameter, each have a summand of the gradient.
        """
        readers = self.readers(leaf)
        duplicated = self.annotated.splits_batch and leaf.node not in self.batch.summed_cotangents
        trained = leaf.node in self.annotated.flow.differentiable
        if duplicated and trained and len(readers) > len(self.annotated.stages):
            raise PlanError(
                f"parameter {leaf.name!r} is read by several stages, and by ops that do not see the batch; use a "
                f"plan whose pipelines have one stage"
            )
        kind = "duplicate" if duplicated and trained else "partial"
        return self.across(leaf.node, readers, "duplicate"), self.across(leaf.node, readers, kind, summed=True)

    def readers(self, leaf: Leaf) -> tuple[StageLayout, ...]:
        """Return the stages that read a leaf, pipeline after pipeline."""
        return self._readers.get(leaf.node, ())

    @cached_property
    def _readers(self) -> Mapping[fx.Node, tuple[StageLayout, ...]]:
        readers: dict[fx.Node, list[StageLayout]] = {}
        for layout in self.annotated.layouts:
            for node in stage_nodes(self.annotated, layout).needed:
                if node.op == "placeholder":
                    readers.setdefault(node, []).append(layout)
        return {node: tuple(layouts) for node, layouts in readers.items()}

    @cached_property
    def talks_across_replicas(self) -> bool:
        """Tell whether some op in the middle of the model needs a sum over all replicas."""
        updates = self.annotated.graph.outputs_of(OutputKind.BUFFER_UPDATE)
        return self.batch.talks or any(isinstance(self.batch.states.get(node), Summed) for _, node in updates)

    def parameters(self) -> tuple[Leaf, ...]:
        """Return the parameter leaves that some stage reads."""
        return tuple(leaf for leaf in self.annotated.graph.leaves_of(LeafKind.PARAMETER) if self.readers(leaf))


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
    own = [node for node, stage in stage_of.items() if stage == index]
    roots = [*sent, *(annotated.graph.output_values[i] for i in outputs), *(n for n in own if n in sent)]
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


class SlotKind(StrEnum):
    """What a placeholder of a device graph is fed with."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    COUNT = "count"
    RANDOM_STATE = "random_state"
    RECEIVED = "received"


class ResultKind(StrEnum):
    """What a result of a device graph is for."""

    LOSS = "loss"
    VALUE = "value"
    BUFFER_UPDATE = "buffer_update"
    SENT = "sent"


@dataclass(frozen=True)
class Slot:
    """One placeholder of a device graph; `name` is the leaf's name, or the sending node's for RECEIVED."""

    kind: SlotKind
    name: str


@dataclass(frozen=True)
class Result:
    """One result of a device graph; `name` is the output's name, or the node's for SENT."""

    kind: ResultKind
    name: str


@dataclass(frozen=True, eq=False)
class Value:
    """A value that leaves a stage: its logical shape (int or sympy expression per dim), and where it lies.

    `rows_dim` is the dim that counts rows of the batch (None: the value does not grow with the batch).
    """

    name: str
    shape: LogicalShape
    dtype: torch.dtype
    differentiable: bool
    rows_dim: int | None
    annotation: Annotation


@dataclass(frozen=True, eq=False)
class Handover:
    """A value that goes from one stage to a later one, forward; its cotangent goes the other way."""

    value: Value
    source: tuple[int, int]
    target: tuple[int, int]
    target_annotation: Annotation


@dataclass(frozen=True, eq=False)
class DeviceGraph:
    """What one rank runs: its stage's graph with local shapes, and what it exchanges with other stages."""

    rank: int
    layout: StageLayout
    num_stages: int
    graph: fx.Graph
    slots: tuple[Slot, ...]
    results: tuple[Result, ...]
    handovers_in: tuple[Handover, ...]
    handovers_out: tuple[Handover, ...]
    values: tuple[Value, ...]
