"""Put a plan on a graph: the stage of every op, the devices of every stage, and the part that each of them has.

Ops that both the batch and parameters reach belong to one stage each. Everything else (masks, rotary tables,
transposed weights) belongs to none and is computed wherever it is read, so that it never travels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch
from itertools import accumulate
from typing import ClassVar

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, FactorMap
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph, StageAxis, StageLayout
from hetu_fx.transforms.layouts.choose_classes import is_eligible, tensor_classes
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.sequence_parallel import sequence_classes, shares

Splits = frozenset[FactorClass]


@dataclass(frozen=True)
class Annotate:
    """Put a plan on a graph: stages, devices, and the parts of the split classes.

    Requires: an analysed graph. The plan's devices, blocks and splits are ones that the graph has.
    Ensures: every op that batch and parameters both reach has a stage in each pipeline; every stage knows its parts.
        The classes that tensor parallel groups split are those that spread most work for least communication.

        %up = linear(%x, %w_up)         ->      %up: stage 0.0     on devices [0, 1], each a part of the dim of %w_up
        %loss = mean(%y)                        %loss: stage 0.1   on device [2]
    """

    plan: Plan
    wants_values: bool = True
    name: ClassVar[str] = "annotate"

    def __call__(self, analysed: AnalysedGraph) -> AnnotatedGraph:
        graph, factors, flow = analysed.graph, analysed.factors, analysed.flow
        wanted = tensor_classes(graph, factors, flow, _asked_for(self.plan, factors)) if self._is_split else frozenset()
        classes = self._classes(graph, factors, wanted)
        sequence = self._sequence(graph, factors, flow, classes, wanted)
        pipelines = self.plan.pipelines
        stage_of = tuple(self._stages(graph, flow, pipeline) for pipeline in pipelines)
        layouts = tuple(
            tuple(_layout(p, s, stage, classes, sequence, factors) for s, stage in enumerate(pipeline.stages))
            for p, pipeline in enumerate(pipelines)
        )
        splits = classes, sequence
        annotated = AnnotatedGraph(graph, factors, flow, self.plan, self.wants_values, *splits, layouts, stage_of)
        _check_batch(annotated)
        return annotated

    @property
    def _is_split(self) -> bool:
        """Tell whether some stage has several devices."""
        return any(len(stage.devices) > 1 for *_, stage in self.plan.stages)

    def _classes(self, graph: Graph, factors: FactorMap, wanted: Splits) -> Splits:
        """Return those of the `wanted` classes that tensor parallel stages split."""
        widest = max(len(tensor) for *_, stage in self.plan.stages for _, tensor in [stage.axes])
        if widest == 1:
            return frozenset()
        optional = _looked_across(graph, factors).difference(_asked_for(self.plan, factors))
        return frozenset(c for c in wanted if c not in optional or (c.size or 0) >= widest)

    def _sequence(self, graph: Graph, factors: FactorMap, flow: Flow, classes: Splits, wanted: Splits) -> Splits:
        """Return what may be shared as a sequence: what no stage would rather split, or what none splits."""
        context = any(stage.shares_sequence for *_, stage in self.plan.stages)
        if not context and not (self.plan.sequence_parallel and self._is_split):
            return frozenset()
        found = sequence_classes(graph, factors, flow, wanted) or sequence_classes(graph, factors, flow, classes)
        if not found:
            asked = "context" if context else "sequence_parallel"
            raise PlanError(
                f"the plan asks for {asked}, but besides the rows of the batch this model has no dim that its "
                f"products with parameters carry along; leave {asked} out"
            )
        return found

    def _stages(self, graph: Graph, flow: Flow, pipeline: Pipeline) -> Mapping[fx.Node, int]:
        blocks = pipeline.blocks(graph.num_blocks) if graph.num_blocks else (0,) * len(pipeline.stages)
        return cut_stages(graph, flow, blocks)


def _layout(
    pipeline: int, index: int, stage: Stage, classes: Splits, sequence: Splits, factors: FactorMap
) -> StageLayout:
    context, tensor = stage.axes
    parts = {factor: part_sizes(factor, tensor, factors) for factor in _in_order(classes)} if len(tensor) > 1 else {}
    pieces = {factor: shares(factor, context if stage.shares_sequence else tensor) for factor in _in_order(sequence)}
    if not stage.shares_sequence:  # a tensor parallel group may share the sequence where it splits nothing else
        parts, pieces = {**parts, **pieces}, {}
    axes = StageAxis(len(context), pieces), StageAxis(len(tensor), parts)
    return StageLayout(pipeline, index, stage.devices, *axes)


def _in_order(classes: Splits) -> list[FactorClass]:
    return sorted(classes, key=lambda c: c.id)


def _check_batch(annotated: AnnotatedGraph) -> None:
    if annotated.splits_batch and annotated.graph.batch_symbol is None:
        why = "; ".join(annotated.graph.notes) or "the example batch has no common batch dim"
        raise PlanError(
            f"this model's batch size is fixed in its graph ({why}), so its rows cannot be spread over "
            f"{len(annotated.plan.pipelines)} pipelines or micro-batches; use one pipeline and one micro-batch"
        )


def _asked_for(plan: Plan, factors: FactorMap) -> tuple[FactorClass, ...]:
    """Return the classes that the plan's `split` names by dims of parameters."""
    found: dict[FactorClass, None] = {}
    for pattern, dim in plan.split:
        leaves = [leaf for leaf in factors.leaves if leaf.kind is LeafKind.PARAMETER and fnmatch(leaf.name, pattern)]
        dims = [factors.dims(leaf.node)[dim] for leaf in leaves if dim < len(factors.dims(leaf.node))]
        classes = [c for classes in dims for c in classes if is_eligible(c, factors)]
        if not classes:
            names = [leaf.name for leaf in factors.leaves if leaf.kind is LeafKind.PARAMETER]
            raise PlanError(
                f"the plan wants dim {dim} of {pattern!r} split, but no parameter of that name has such a dim that can "
                f"be; parameters: {', '.join(names[:4])}, ..."
            )
        found.update(dict.fromkeys(classes))
    return tuple(found)


def _looked_across(graph: Graph, factors: FactorMap) -> frozenset[FactorClass]:
    """Return the classes that some op has a sharded form for: of a few labels, each device may have them all."""
    ops = (factors.op(node) for node in graph.graph.nodes if factors.is_op(node))
    return frozenset(factor for op in ops for factor in op.sharded)


def part_sizes(factor: FactorClass, ratios: tuple[int, ...], factors: FactorMap) -> tuple[int, ...]:
    """Return each device's part of `factor`, in proportion to `ratios`, at least one each.

    Raises:
        PlanError: more devices than parts; names the parameters.
    """
    assert factor.size is not None
    if factor.size < len(ratios):
        where = ", ".join(f"dim {dim} of {name}" for name, dim in factors.occurrences(factor)[:4])
        raise PlanError(
            f"cannot split a dimension of {factor.size} parts over {len(ratios)} devices ({where}); use at most "
            f"{factor.size} devices in one stage, or more stages or pipelines"
        )
    return _largest_remainder(factor.size, ratios)


def _largest_remainder(total: int, ratios: tuple[int, ...]) -> tuple[int, ...]:
    """Cut `total` in proportion to `ratios`, every part at least one, ties to the first."""
    exact = [(total - len(ratios)) * ratio / sum(ratios) for ratio in ratios]
    ideal = [total * ratio / sum(ratios) for ratio in ratios]
    parts = [max(1, math.floor(share)) for share in ideal]
    if sum(parts) > total:
        parts = [1 + math.floor(share) for share in exact]
    order = sorted(range(len(ratios)), key=lambda i: (parts[i] - ideal[i], i))
    for i in range(total - sum(parts)):
        parts[order[i % len(order)]] += 1
    return tuple(parts)


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
    _check_stages(stages, len(blocks))
    return stages


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
            f"stage(s) {empty} of {num_stages} would hold no operation of this model; use fewer stages, or move "
            f"blocks to them"
        )
