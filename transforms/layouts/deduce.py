"""Deduce how every value of an annotated graph lies, on the batch axis and on those inside stages.

Attention of context parallel stages gathers keys and values, or passes them round in parts. Gathered, they travel
before an op starts, and the gradients of both after it has ended; each device keeps all of them for the backward. In a
ring they travel beside the computation, but twice, and no device keeps more than its part. So what is computed must be
long enough to hide that: the work grows with the square of the sequence, what travels only with its length.

    gathered:   all_gather(k) + all_gather(v) + reduce_scatter(dk) + reduce_scatter(dv)
    ring:       max(0, T - h C) + max(home, T' - 2.5 h C) + 2 (n - 1) s,   h = (n - 1) / n

for n devices, C the seconds that each computes forward, T and T' those of the transfers forward and backward, of which
no computation hides the last hop home, and s what a step more takes. The backward has five products where the forward
has two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import ClassVar

from torch import fx

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.ops.table import FUSED_OPS
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.deduction.factors.factors import FactorClass, OpFactors, flat
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.calls import draws
from hetu_fx.graph.edit import descendants
from hetu_fx.graph.graph import LeafKind, OutputKind
from hetu_fx.graph.leaves.leaf_ops import told_op
from hetu_fx.plans.schedule import cuts_backwards
from hetu_fx.transforms.layouts.annotated_graph import (
    CONTEXT,
    FINE,
    TENSOR,
    AnnotatedGraph,
    StageAxis,
    StageLayout,
    read_outside,
    stage_nodes,
)
from hetu_fx.transforms.layouts.axis import AxisDeduction, Splits, deduce_batch_axis, deduce_tensor_axis
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.exchange import exchanged_ops
from hetu_fx.transforms.layouts.flow import linear_source
from hetu_fx.transforms.layouts.program_choices import Choices
from hetu_fx.transforms.layouts.reshard_cost import (
    FLOPS_PER_SECOND,
    TYPICAL_LINKS,
    Prices,
    node_bytes,
    products_by_byte,
    travelling_work,
)
from hetu_fx.transforms.layouts.sequence_parallel import (
    UNCUT,
    SequenceCut,
    computable_on_part,
    context_cut,
    is_product,
    leading,
    sequence_cut,
)
from hetu_fx.transforms.layouts.states import WHOLE, SplitOn, Summed

BACKWARD_PRODUCTS = 2.5
"""Products of the backward by those of the forward: scores again, and the gradients of all four factors."""

BACKWARD_MEETINGS = 2
"""Times that devices wait in each step of the backward: for keys and values, and for their gradients."""

STEP_SECONDS = 2e-4
"""What each step after the first takes, however small: a dozen small ops and two messages, as measured on a CPU."""

FIXED_COPIES = 4
"""What a device holds for each parameter: it, its gradient, and two moments."""

MOST_GATHERED = 0.5
"""The share of what is left beside those that gathered keys and values may fill."""


_MOST_TOLD = 5
"""Ops that a refusal names."""


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
        _check_draws(annotated)
        rows = frozenset(c for c in factors.classes if c.is_batch) if annotated.splits_batch else frozenset()
        outside, batch = read_outside(annotated), deduce_batch_axis(graph, factors, flow, rows)
        given = {"outside": outside, "exchanged": frozenset(batch.exchanged)}

        def inside(splits: Splits, cut: SequenceCut, axis: int, choices: Choices | None = None) -> AxisDeduction:
            if not splits and cut == UNCUT and choices is None:
                return whole
            prices = axis_prices(annotated, axis, self.topology, self.num_bytes)
            return deduce_tensor_axis(graph, factors, flow, splits, prices, cut=cut, choices=choices, **given)

        if not annotated.runs_in_step:
            _check_sums(annotated, batch)
        excluded, nothing = frozenset(batch.talking()), frozenset[FactorClass]()
        whole = deduce_batch_axis(graph, factors, flow, nothing) if rows else batch
        context = whole
        if annotated.context_layouts:
            rings = self._rings(annotated, excluded)
            exchanged = exchanged_ops(annotated, excluded)
            context = inside(nothing, context_cut(annotated, excluded, outside, rings, exchanged), CONTEXT)
        _check_shared(annotated, context)
        return DeducedGraph(
            annotated,
            batch=batch,
            tensor_split=inside(
                annotated.classes, sequence_cut(annotated, excluded, outside), TENSOR, annotated.choices
            ),
            tensor_whole=whole,
            context=context,
            fine=inside(annotated.fine, UNCUT, FINE),
        )

    def _rings(self, annotated: AnnotatedGraph, excluded: frozenset[fx.Node]) -> frozenset[fx.Node]:
        prices = axis_prices(annotated, CONTEXT, self.topology, self.num_bytes)
        work = travelling_work(annotated.graph, annotated.factors) if self.work is None else self.work
        cluster = self.topology if isinstance(self.topology, Cluster) else None
        by_node = dict(zip(annotated.graph.graph.nodes, work, strict=True))
        return _Rings(annotated, prices, cluster, by_node, excluded).found()


def axis_prices(
    annotated: AnnotatedGraph, axis: int, topology: Topology | None = None, num_bytes: Sequence[float] | None = None
) -> Prices:
    """Return the prices along an axis of stages; links and sizes that are left out are as `Deduce` says.

    Sizes are of what a group of devices along the axis has: the largest part that the other axes make of a value.
    """
    layouts = [layout for layout in annotated.layouts if layout.axes[axis].ways > 1]
    groups = tuple(group for layout in layouts for group in layout.groups(axis))
    sizes = node_bytes(annotated.graph) if num_bytes is None else num_bytes
    across = [[other for i, other in enumerate(layout.axes) if i != axis] for layout in layouts]
    pairs = zip(annotated.graph.graph.nodes, sizes, strict=True)
    found = {node: size * _largest_share(node, annotated, across) if size else 0.0 for node, size in pairs}
    links = TYPICAL_LINKS if topology is None else topology
    beside = _products_beside(annotated) if axis == TENSOR else {}
    return Prices(groups, found, links, sums_alone=annotated.choices is not None, beside=beside)


def _products_beside(annotated: AnnotatedGraph) -> dict[fx.Node, float]:
    """Return what is made beside sums of cotangents: nothing where gradients of weights wait for their turn.

    Nor where a program says how ops run, which is priced as HAP prices it.
    """
    if annotated.choices is not None or cuts_backwards(annotated.plan.schedule):
        return {}
    return products_by_byte(annotated.graph, annotated.factors, annotated.flow)


def _largest_share(node: fx.Node, annotated: AnnotatedGraph, across: Sequence[Sequence[StageAxis]]) -> float:
    classes = flat(annotated.factors.dims(node))
    return max((prod(axis.largest_share(classes) for axis in axes) for axes in across), default=1.0)


def _check_shared(annotated: AnnotatedGraph, context: AxisDeduction) -> None:
    """Refuse to share a sequence where a product on activations would be computed whole on every device.

    Raises:
        PlanError: naming the op and the user's line.
    """
    parameters = descendants(annotated.graph, [leaf.node for leaf in annotated.graph.leaves_of(LeafKind.PARAMETER)])
    for layout in annotated.context_layouts:
        needed = stage_nodes(annotated, layout).needed & parameters & context.decisions.keys()
        for node in filter(needed.__contains__, annotated.graph.graph.nodes):  # all ranks name the same op
            op = annotated.factors.op(node)
            if context.decisions[node].factor is None and op.classes & annotated.sequence and is_product(op):
                raise PlanError(
                    f"devices {list(layout.devices)} cannot share the sequence (context {layout.context.ways}): "
                    f"{node.target} ('{node.name}', {meta.source_line(node)}) needs all of it, so that each device "
                    f"would compute the same\nhint: leave 'context' out for a tensor parallel stage, or use pipelines"
                )


def _check_draws(annotated: AnnotatedGraph) -> None:
    """Refuse ops that draw from torch's generators on several devices: each would draw other numbers.

    Raises:
        PlanError: naming the op and the user's line.
    """
    devices = sorted({device for layout in annotated.layouts for device in layout.devices})
    node = next(filter(draws, annotated.graph.graph.nodes), None) if len(devices) > 1 else None
    if node is not None:
        raise PlanError(
            f"{node.target} ('{node.name}', {meta.source_line(node)}) draws from torch's own generator: each "
            f"of the devices {devices} has its own, and would draw other numbers\n"
            "hint: use a plan of one device, or draw by uniform, normal or exponential numbers, which are the same "
            "under every plan"
        )


def _check_sums(annotated: AnnotatedGraph, batch: AxisDeduction) -> None:
    """Refuse sums over the batch in the middle of a model, or in its buffers, that runs in stages or micro-batches."""
    updates = [node for _, node in annotated.graph.outputs_of(OutputKind.BUFFER_UPDATE)]
    summed = (node for node in updates if isinstance(batch.states.get(node), Summed))
    node = next(chain(batch.talking(), summed), None)
    if node is not None:
        told = Counter(f"{told_op(one)} ({meta.source_line(one)})" for one in batch.talking())
        readers = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in told.most_common(_MOST_TOLD))
        readers += f" and {len(told) - _MOST_TOLD} more" * (len(told) > _MOST_TOLD)
        raise PlanError(
            f"'{node.name}' ({meta.source_line(node)}) needs the rows of the whole batch in the middle of the model, "
            f"which pipeline stages and micro-batches cannot give"
            f"\nhint: use a plan whose pipelines have one stage and one "
            f"micro-batch" + f"\nrows are gathered for {readers}" * bool(readers)
        )


@dataclass(frozen=True, eq=False)
class _Rings:
    """Finds the ops that pass operands round.

    Attributes:
        annotated: the graph with its plan, which may ask for one way.
        prices: of moves on the links; `cluster` says how fast devices compute and what they hold, where it is known.
        work: the FLOPs of each op forward, as far as it looks across what travels.
        excluded: ops that stay whole whatever is asked.
    """

    annotated: AnnotatedGraph
    prices: Prices
    cluster: Cluster | None
    work: Mapping[fx.Node, float]
    excluded: frozenset[fx.Node]

    def found(self) -> frozenset[fx.Node]:
        """Return the ops.

        Raises:
            PlanError: the plan asks for rings, but no op can pass its operands round.
        """
        asked, able = self.annotated.plan.attention, self._able()
        if asked == "ring" and not able:
            raise PlanError(
                "the plan's attention is 'ring', but this model has no attention that can pass keys and values round: "
                "it is written out in products (as one with dropout is), or its mask is trained"
                "\nhint: give 'gathered', or leave attention out"
            )
        if asked in ("gathered", "heads") or not able:
            return frozenset()
        if asked == "ring" or any(self._fills_memory(layout, able) for layout in self.annotated.context_layouts):
            return able
        return frozenset(node for node in able if self._is_faster(node))

    def _able(self) -> frozenset[fx.Node]:
        needed = (stage_nodes(self.annotated, layout).needed for layout in self.annotated.context_layouts)
        nodes = {node for nodes in needed for node in nodes if self.annotated.factors.is_op(node)} - self.excluded
        return frozenset(filter(self._can_travel, nodes))

    def _can_travel(self, node: fx.Node) -> bool:
        op, sequence = self.annotated.factors.op(node), self.annotated.sequence
        if not op.travelling or not sequence.issuperset(op.travelling.values()):
            return False
        others = [o.node for i, o in enumerate(op.operands[1:], 1) if i not in op.travelling]
        return self._cuts_rows(node, op) and self.annotated.flow.differentiable.isdisjoint(others)

    def _cuts_rows(self, node: fx.Node, op: OpFactors) -> bool:
        """Tell whether the op runs on parts of its first operand's rows, and not of a dim before those."""
        factors = leading(op, computable_on_part(node, self.annotated))
        return bool(factors) and op.operands[0].dims[-2] == tuple(factors)

    def _is_faster(self, node: fx.Node) -> bool:
        ring = max(
            self._ring_seconds(node, ranks, self._share(node, layout, ranks[0]))
            for layout in self.annotated.context_layouts
            for ranks in layout.groups(CONTEXT)
        )
        return ring < self._gathered_seconds(node)

    def _share(self, node: fx.Node, layout: StageLayout, rank: int) -> float:
        """Return which part of the op's work the devices have that stand with one along the sequence."""
        classes = self.annotated.factors.op(node).classes
        places = list(zip(layout.axes, layout.coordinates(rank), strict=True))[TENSOR:]
        return prod(axis.share(classes, place) for axis, place in places)

    def _gathered_seconds(self, node: fx.Node) -> float:
        travelling, trained = self.annotated.factors.op(node).travelling, self._is_trained(node)
        sources = [(self._source(operand), SplitOn(travelling[i])) for i, operand in self._operands(node)]
        changes = [self.prices.change(at, state, WHOLE, summed=True, trained=trained) for at, state in sources]
        ranks = self.annotated.context_layouts[0].groups(CONTEXT)[0]
        return sum(changes) + (1 + trained) * len(sources) * self._meeting_seconds(ranks)

    def _meeting_seconds(self, ranks: Sequence[int]) -> float:
        """Return what a meeting of devices between pieces of compute costs besides its message."""
        return 0.0 if self.cluster is None else self.cluster.meeting_seconds(ranks)

    def _ring_seconds(self, node: fx.Node, ranks: Sequence[int], share: float) -> float:
        """Return the seconds of a ring in a group that has a share of the op's work."""
        num_bytes = self._bytes(operand for _, operand in self._operands(node))
        forward, backward = (
            FUSED_OPS[name].cost(num_bytes, ranks, self.prices.topology)
            for name in ("ring_attention", "ring_attention_backward")
        )
        hidden = share * self._compute_seconds(node, ranks) * (len(ranks) - 1) / len(ranks)
        steps, meeting = STEP_SECONDS * (len(ranks) - 1), (len(ranks) - 1) * self._meeting_seconds(ranks)
        seconds = max(0.0, forward - hidden) + steps + meeting
        if self._is_trained(node):
            home = backward - 2 * forward
            seconds += max(home, backward - BACKWARD_PRODUCTS * hidden) + steps + BACKWARD_MEETINGS * meeting
        return seconds

    def _compute_seconds(self, node: fx.Node, ranks: Sequence[int]) -> float:
        """Return the seconds of the forward on each device, parts being in proportion to speeds."""
        speeds = [FLOPS_PER_SECOND if self.cluster is None else self.cluster.device(rank).speed for rank in ranks]
        return self.work.get(node, 0.0) / sum(speeds)

    def _fills_memory(self, layout: StageLayout, able: frozenset[fx.Node]) -> bool:
        """Tell whether gathered keys and values would leave a device of the stage too little memory."""
        if self.cluster is None:
            return False
        needed = stage_nodes(self.annotated, layout).needed
        sources = {self._source(operand) for node in needed & able for _, operand in self._operands(node)}
        leaves = {leaf.node for leaf in self.annotated.graph.leaves_of(LeafKind.PARAMETER)}
        gathered, parameters = (self._bytes(nodes) for nodes in (sources, needed & leaves))
        memory = min(self.cluster.device(rank).memory_bytes for rank in layout.devices)
        return gathered > MOST_GATHERED * max(0.0, memory - FIXED_COPIES * parameters)

    def _bytes(self, nodes: Iterable[fx.Node]) -> float:
        return sum(self.prices.num_bytes.get(node, 0.0) for node in nodes)

    def _operands(self, node: fx.Node) -> list[tuple[int, fx.Node]]:
        op = self.annotated.factors.op(node)
        return [(position, op.operands[position].node) for position in sorted(op.travelling)]

    def _is_trained(self, node: fx.Node) -> bool:
        return node in self.annotated.flow.differentiable

    def _source(self, node: fx.Node) -> fx.Node:
        """Return the value that would be gathered: of those that this one is linear in, the first that is no larger."""
        source = linear_source(node, self.annotated.factors, self.annotated.flow)
        smaller = source is not None and self.annotated.flow.through_inputs(source)
        if source is None or not smaller or meta.numel(node) < meta.numel(source):
            return node
        return self._source(source)
