"""A graph with a plan put on it, and what a pipeline stage of it consists of: devices, ops, what it receives and sends.

A graph comes to a device in stages, one type each; a pass takes one and returns the next:

    Graph -> AnalysedGraph -> AnnotatedGraph -> DeducedGraph -> DeviceGraph
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, FactorMap
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.edit import ancestors
from hetu_fx.graph.graph import Graph, OutputKind, OutputLeaf
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.plan import Plan, Stage
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.program_choices import Choices

CONTEXT, TENSOR, FINE = 0, 1, 2
"""The axes of a stage's grid of devices, the outer one first."""


@dataclass(frozen=True, eq=False)
class StageAxis:
    """One axis of a stage's grid of devices: how many it has, and the part of every class that each of them has.

    Of a class whose size only the run tells, `sizes` has the shares. `others` has the parts by the ratios of further
    segments of a program, the first of which is segment 1.
    """

    ways: int
    sizes: Mapping[FactorClass, tuple[int, ...]]
    others: tuple[Mapping[FactorClass, tuple[int, ...]], ...] = ()

    def parts(self, factor: FactorClass, segment: int = 0) -> tuple[int, ...]:
        """Return the part of a class that each device has by the ratios of a segment."""
        return (self.sizes, *self.others)[segment][factor]

    def share(self, classes: Iterable[FactorClass], place: int) -> float:
        """Return which part a device has, by its place, of what has these classes; 1 of what the axis does not cut."""
        cut = next((self.sizes[factor] for factor in classes if factor in self.sizes), None)
        return 1.0 if cut is None else cut[place] / sum(cut)

    def largest_share(self, classes: Iterable[FactorClass]) -> float:
        """Return the largest part that a device has of what has these classes."""
        given = tuple(classes)
        return max(self.share(given, place) for place in range(self.ways))


ALONE = StageAxis(1, {})


@dataclass(frozen=True, eq=False)
class StageLayout:
    """One pipeline stage, or a chunk of it: its devices, a grid of which the last axis varies fastest.

    Along `context` they share the sequence, along `tensor` the classes that tensor parallel stages split, and along
    `fine` what stands inside of those, where there are more devices than a class has parts. An axis that the stage does
    not have is one of one way.
    """

    pipeline: int
    index: int
    devices: tuple[int, ...]
    context: StageAxis
    tensor: StageAxis
    fine: StageAxis = ALONE

    @property
    def key(self) -> tuple[int, int]:
        """Return (pipeline, index): of the stage, or of the part of the pipeline that a chunk of it is."""
        return self.pipeline, self.index

    @property
    def axes(self) -> tuple[StageAxis, ...]:
        """Return all axes, the outer one first."""
        return self.context, self.tensor, self.fine

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return a device's place on all axes."""
        group, fine = divmod(self.devices.index(rank), self.fine.ways)
        return (*divmod(group, self.tensor.ways), fine)

    def peers(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return for each axis the devices along it that a device stands among, in order."""
        position, found, step = self.devices.index(rank), [], len(self.devices)
        for axis, place in zip(self.axes, self.coordinates(rank), strict=True):
            step //= axis.ways
            first = position - place * step
            found.append(self.devices[first : first + axis.ways * step : step])
        return tuple(found)

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """Return the groups of devices along an axis; none along one of one way."""
        found = dict.fromkeys(self.peers(rank)[axis] for rank in self.devices)
        return tuple(found) if self.axes[axis].ways > 1 else ()


@dataclass(frozen=True, eq=False)
class AnnotatedGraph:
    """A graph with a plan put on it: which classes are split where, and which stage each op belongs to.

    Attributes:
        wants_values: outputs other than the loss are computed too.
        classes: factor classes that tensor-parallel stages split.
        sequence: those that they split where they can split none of `classes`, and that context parallel stages
            split throughout.
        fine: those that tensor-parallel stages of more devices than `classes` have parts split besides.
        choices: what the stage's program says of each op, if it has one.
        stages: layouts by pipeline, then by stage; chunks of stages count as stages here (`Plan.parts`).
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
    fine: frozenset[FactorClass] = frozenset()
    choices: Choices | None = None

    @cached_property
    def pipelines(self) -> tuple[PartedPipeline, ...]:
        """Return the plan's pipelines, with the parts that are stages here."""
        return self.plan.parts(self.graph.num_blocks)

    def stage(self, layout: StageLayout) -> Stage:
        """Return what the plan says of a stage, or of a chunk of it."""
        return self.pipelines[layout.pipeline].parts[layout.index]

    def layouts_of(self, rank: int) -> tuple[StageLayout, ...]:
        """Return the layouts of a rank: its stage, or the chunks of it; none where the plan leaves it out."""
        return tuple(layout for layout in self.layouts if rank in layout.devices)

    @property
    def layouts(self) -> tuple[StageLayout, ...]:
        """Return all stage layouts, pipeline after pipeline."""
        return tuple(layout for pipeline in self.stages for layout in pipeline)

    @property
    def context_layouts(self) -> tuple[StageLayout, ...]:
        """Return those whose devices share the sequence."""
        return tuple(layout for layout in self.layouts if layout.context.ways > 1)

    @property
    def splits_batch(self) -> bool:
        """Tell whether rows are spread over pipelines or micro-batches."""
        pipelines = self.plan.pipelines
        return len(pipelines) > 1 or any(pipeline.micro_batches > 1 for pipeline in pipelines)

    @property
    def runs_in_step(self) -> bool:
        """Tell whether all replicas run one stage and one micro-batch, so that ops can talk across replicas."""
        return all(len(p.stages) == 1 and p.micro_batches == 1 for p in self.plan.pipelines)


def cut_stages(graph: Graph, flow: Flow, blocks: tuple[int, ...]) -> Mapping[fx.Node, int]:
    """Return the stage of every op that belongs to one; `blocks` is the number of repeated blocks per stage.

    What stands before the first block goes to the first stage, what stands after the last to the last. A model
    without repeated blocks is cut where about even shares of its parameters have been read.
    """
    positions = _by_blocks(graph, blocks) if graph.num_blocks else _by_parameters(graph, flow, len(blocks))
    stages: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and flow.is_mixed(node):
            before = [stages[n] for n in node.all_input_nodes if n in stages]
            stages[node] = max([positions[node], *before])
    _keep_open_sizes_inside(stages, flow)
    _check_stages(stages, len(blocks))
    return stages


def _keep_open_sizes_inside(stages: dict[fx.Node, int], flow: Flow) -> None:
    """Move values of a size that only values tell (the rows of an expert) to where they are read: none is sent.

    Raises:
        PlanError: one is read by several stages, or made by an op that reads parameters of an earlier one.
    """
    for node in reversed(stages):
        if not meta.is_data_dependent(node):
            continue
        readers = [stages[user] for user in node.users if user in stages]
        first = min(readers, default=stages[node])
        if flow.parameters.isdisjoint(arg for arg in node.all_input_nodes if arg.op == "placeholder"):
            stages[node] = first
        if any(stage > stages[node] for stage in readers):
            raise PlanError(
                f"a value of a size that only the values of a batch tell ({meta.source_line(node)}) is made in stage "
                f"{stages[node]} and read in {sorted(set(readers))}: it cannot be sent\nhint: use one stage, or cut "
                f"the blocks elsewhere"
            )


def _by_blocks(graph: Graph, blocks: tuple[int, ...]) -> Mapping[fx.Node, int]:
    ends = list(accumulate(blocks))
    last = len(blocks) - 1

    def stage(node: fx.Node) -> int:
        position = graph.position(node)
        if position < 0:
            return 0
        if position == graph.num_blocks - 1 and graph.block_of(node) is None:
            return last
        return next((i for i, end in enumerate(ends) if position < end), last)

    return {node: stage(node) for node in graph.graph.nodes}


def _by_parameters(graph: Graph, flow: Flow, num_stages: int) -> Mapping[fx.Node, int]:
    """Place an op that reads parameters by the middle of them among all, others with the last such op before."""
    leaves = {leaf.node for leaf in graph.leaves}
    seen: set[fx.Node] = set()
    middles: dict[fx.Node, float] = {}
    total, middle = 0, 0.0
    for node in graph.graph.nodes:
        fresh = [n for n in node.all_input_nodes if n in leaves and n in flow.parameters and n not in seen]
        size = sum(map(meta.numel, fresh))
        if size:
            middle = total + size / 2
        seen.update(fresh)
        total += size
        middles[node] = middle
    return {node: min(num_stages - 1, int(num_stages * middle / max(total, 1))) for node, middle in middles.items()}


def _check_stages(stages: Mapping[fx.Node, int], num_stages: int) -> None:
    empty = sorted(set(range(num_stages)) - set(stages.values()))
    if empty:
        raise PlanError(
            f"stage(s) {empty} of {num_stages} would hold no operation of this model\nhint: use fewer stages, or move "
            f"blocks to them"
        )


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
    walked = ancestors(roots, lambda node: () if stage_of.get(node, index) < index else node.all_input_nodes)
    received = {node for node in walked if stage_of.get(node, index) < index}
    order = {node: i for i, node in enumerate(annotated.graph.graph.nodes)}
    return StageNodes(walked - received, tuple(sorted(received, key=order.__getitem__)), sent, outputs)


def _is_made(leaf: OutputLeaf, wants_values: bool) -> bool:
    """Tell whether a stage makes this output; counts are made by the prologue."""
    if leaf.kind is OutputKind.VALUE:
        return wants_values
    return leaf.kind is not OutputKind.COUNT


def read_outside(annotated: AnnotatedGraph) -> frozenset[fx.Node]:
    """Return outputs, what goes to other stages, and what is read by something else than an op on tensors."""
    graph = annotated.graph
    pairs = zip(graph.outputs, graph.output_values, strict=True)
    outputs = {node for leaf, node in pairs if _is_made(leaf, annotated.wants_values)}
    sent = {node for layout in annotated.layouts for node in stage_nodes(annotated, layout).sent}
    return frozenset(outputs | sent | {node for node in graph.graph.nodes if _has_other_readers(node, annotated)})


def _has_other_readers(node: fx.Node, annotated: AnnotatedGraph) -> bool:
    readers = (user for user in node.users if user.op == "call_function" and not annotated.factors.is_op(user))
    return meta.is_tensor(node) and any(not is_size(user) for user in readers)


def is_size(node: fx.Node) -> bool:
    """Tell whether the node reads one size of a tensor."""
    return str(node.target) == "aten.sym_size.int"
