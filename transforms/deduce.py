"""Deduce how every value of an annotated graph lies, on the batch axis and on the tensor axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch import fx

from hetu_fx.comm_ops.cost import Topology
from hetu_fx.deduction.factors import FactorClass
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import OutputKind
from hetu_fx.topology import Cluster
from hetu_fx.transforms.axis import AxisDeduction, Splits, deduce_batch_axis, deduce_tensor_axis
from hetu_fx.transforms.context import check_shared, context_cut
from hetu_fx.transforms.deduced import DeducedGraph
from hetu_fx.transforms.outside import read_outside
from hetu_fx.transforms.prices import TYPICAL_LINKS, Prices, bytes_of
from hetu_fx.transforms.rings import Rings
from hetu_fx.transforms.sequence import UNCUT, SequenceCut, sequence_cut
from hetu_fx.transforms.stages import AnnotatedGraph
from hetu_fx.transforms.states import Summed
from hetu_fx.transforms.work import travelling_work


@dataclass(frozen=True, eq=False)
class Deduce:
    """Deduce the state of every value on both axes.

    Requires: an annotated graph.
    Ensures: every op has a decision on each axis, every value a state; sums over the batch stay open to the end. The
    tensor axis has the layouts that cost least by `topology`, for tensors of `num_bytes` bytes, in the order of the
    graph's nodes (left out: typical links, and the sizes of the example batch). What context parallel stages pass round
    is chosen by `work` besides (`travelling_work` of the graph). All ranks must give the same.
    """

    topology: Topology | None = None
    num_bytes: Sequence[float] | None = None
    work: Sequence[float] | None = None
    name: str = "deduce"

    def __call__(self, annotated: AnnotatedGraph) -> DeducedGraph:
        graph, factors, flow = annotated.graph, annotated.factors, annotated.flow
        rows = frozenset(c for c in factors.classes if c.is_batch) if annotated.splits_batch else frozenset()
        prices, outside = prices_of(annotated, self.topology, self.num_bytes), read_outside(annotated)

        def tensor(splits: Splits, cut: SequenceCut) -> AxisDeduction:
            return deduce_tensor_axis(graph, factors, flow, splits, prices, cut=cut, outside=outside)

        batch = deduce_batch_axis(graph, factors, flow, rows)
        if not annotated.runs_in_step:
            _check_sums(annotated, batch)
        excluded, nothing = frozenset(batch.talking()), frozenset[FactorClass]()
        whole = tensor(nothing, UNCUT)
        context = whole
        if annotated.context_layouts:
            rings = self._rings(annotated, prices, excluded)
            context = tensor(nothing, context_cut(annotated, excluded, outside, rings))
        check_shared(annotated, context)
        return DeducedGraph(
            annotated,
            batch=batch,
            tensor_split=tensor(annotated.classes, sequence_cut(annotated, excluded, outside)),
            tensor_whole=whole,
            context=context,
        )

    def _rings(self, annotated: AnnotatedGraph, prices: Prices, excluded: frozenset[fx.Node]) -> frozenset[fx.Node]:
        work = travelling_work(annotated.graph, annotated.factors) if self.work is None else self.work
        cluster = self.topology if isinstance(self.topology, Cluster) else None
        by_node = dict(zip(annotated.graph.graph.nodes, work, strict=True))
        return Rings(annotated, prices, cluster, by_node, excluded).found()


def prices_of(
    annotated: AnnotatedGraph, topology: Topology | None = None, num_bytes: Sequence[float] | None = None
) -> Prices:
    """Return the prices on the tensor axis; links and sizes that are left out are as `Deduce` says."""
    groups = tuple(layout.devices for layout in annotated.layouts if len(layout.devices) > 1)
    sizes = bytes_of(annotated.graph) if num_bytes is None else num_bytes
    pairs = zip(annotated.graph.graph.nodes, sizes, strict=True)
    return Prices(groups, dict(pairs), TYPICAL_LINKS if topology is None else topology)


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
