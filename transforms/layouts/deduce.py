"""Deduce how every value of an annotated graph lies, on the batch axis and on those inside stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from torch import fx

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.deduction.factors.factors import FactorClass, flat
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import OutputKind
from hetu_fx.transforms.layouts.annotated_graph import CONTEXT, TENSOR, AnnotatedGraph, StageAxis, read_outside
from hetu_fx.transforms.layouts.axis import AxisDeduction, Splits, deduce_batch_axis, deduce_tensor_axis
from hetu_fx.transforms.layouts.context_parallel import check_shared, context_cut
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.reshard_cost import TYPICAL_LINKS, Prices, bytes_of, travelling_work
from hetu_fx.transforms.layouts.ring_choice import Rings
from hetu_fx.transforms.layouts.sequence_parallel import UNCUT, SequenceCut, sequence_cut
from hetu_fx.transforms.layouts.states import Summed


@dataclass(frozen=True, eq=False)
class Deduce:
    """Deduce how every value lies on all axes: rows over replicas, and what is shared inside stages.

    Requires: an annotated graph. All ranks give the same options.
    Ensures: every op has a decision on each axis, every value a state; sums over the batch stay open to the end. The
        axes inside stages have the layouts that cost least by `topology`, for tensors of `num_bytes` bytes, in the
        order of the graph's nodes (left out: typical links, and the sizes of the example batch). What context parallel
        stages pass round is chosen by `work` besides (`travelling_work` of the graph).

        %up = linear(%x, %w_up)         ->      %up: split on the dim of %w_up
        %down = linear(%up, %w_down)            %down: summed, so that its readers need a reshard
    """

    topology: Topology | None = None
    num_bytes: Sequence[float] | None = None
    work: Sequence[float] | None = None
    name: ClassVar[str] = "deduce"

    def __call__(self, annotated: AnnotatedGraph) -> DeducedGraph:
        graph, factors, flow = annotated.graph, annotated.factors, annotated.flow
        rows = frozenset(c for c in factors.classes if c.is_batch) if annotated.splits_batch else frozenset()
        outside = read_outside(annotated)

        def inside(splits: Splits, cut: SequenceCut, prices: Prices) -> AxisDeduction:
            return deduce_tensor_axis(graph, factors, flow, splits, prices, cut=cut, outside=outside)

        batch = deduce_batch_axis(graph, factors, flow, rows)
        if not annotated.runs_in_step:
            _check_sums(annotated, batch)
        excluded, nothing = frozenset(batch.talking()), frozenset[FactorClass]()
        on_context, on_tensor = (prices_of(annotated, i, self.topology, self.num_bytes) for i in (CONTEXT, TENSOR))
        whole = inside(nothing, UNCUT, on_tensor)
        context = whole
        if annotated.context_layouts:
            rings = self._rings(annotated, on_context, excluded)
            context = inside(nothing, context_cut(annotated, excluded, outside, rings), on_context)
        check_shared(annotated, context)
        return DeducedGraph(
            annotated,
            batch=batch,
            tensor_split=inside(annotated.classes, sequence_cut(annotated, excluded, outside), on_tensor),
            tensor_whole=whole,
            context=context,
        )

    def _rings(self, annotated: AnnotatedGraph, prices: Prices, excluded: frozenset[fx.Node]) -> frozenset[fx.Node]:
        work = travelling_work(annotated.graph, annotated.factors) if self.work is None else self.work
        cluster = self.topology if isinstance(self.topology, Cluster) else None
        by_node = dict(zip(annotated.graph.graph.nodes, work, strict=True))
        return Rings(annotated, prices, cluster, by_node, excluded).found()


def prices_of(
    annotated: AnnotatedGraph, axis: int, topology: Topology | None = None, num_bytes: Sequence[float] | None = None
) -> Prices:
    """Return the prices along an axis of stages; links and sizes that are left out are as `Deduce` says.

    Sizes are of what a group of devices along the axis has: the largest part that the other axis makes of a value.
    """
    layouts = [layout for layout in annotated.layouts if layout.axes[axis].ways > 1]
    groups = tuple(group for layout in layouts for group in layout.groups(axis))
    sizes = bytes_of(annotated.graph) if num_bytes is None else num_bytes
    across = [layout.axes[1 - axis] for layout in layouts]
    pairs = zip(annotated.graph.graph.nodes, sizes, strict=True)
    found = {node: size * _largest_share(node, annotated, across) if size else 0.0 for node, size in pairs}
    return Prices(groups, found, TYPICAL_LINKS if topology is None else topology)


def _largest_share(node: fx.Node, annotated: AnnotatedGraph, axes: Sequence[StageAxis]) -> float:
    classes = flat(annotated.factors.dims(node))
    return max((axis.largest_share(classes) for axis in axes), default=1.0)


def _check_sums(annotated: AnnotatedGraph, batch: AxisDeduction) -> None:
    """Refuse sums over the batch in the middle of a model, or in its buffers, that runs in stages or micro-batches."""
    updates = [node for _, node in annotated.graph.outputs_of(OutputKind.BUFFER_UPDATE)]
    summed = (node for node in updates if isinstance(batch.states.get(node), Summed))
    node = next(chain(batch.talking(), summed), None)
    if node is not None:
        raise PlanError(
            f"'{node.name}' ({meta.source_line(node)}) needs a sum over the whole batch in the middle of the model, "
            f"which pipeline stages and micro-batches cannot give; use a plan whose pipelines have one stage and one "
            f"micro-batch"
        )
