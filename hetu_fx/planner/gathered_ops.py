"""What is gathered because no rule splits it: for which ops, and what that takes in a step.

Rows: an op in which rows meet reads those of all replicas, each of which has placed its own among zeros. They are
summed, as all sums over rows in the middle of a step are, and priced as these (`RowSums`). Every replica then computes
the same, up to where it takes its own rows again (`count.meetings`), which the planner prices too
(`ProgramCosts.of_replica`).

Inside stages: an op that needs whole what a group splits is given it whole, and gives summands of its gradient, or all
of it, back. That is priced as deduction has weighed it (`Prices`).

What an op that runs whole computes beside its share is priced as work of stages is (`price.stage`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.graph import meta
from hetu_fx.graph.leaves.leaf_ops import LEAF, told_op
from hetu_fx.planner.count.count import count_work, example_rows, sizes_for_rows, value_bytes
from hetu_fx.planner.count.row_meetings import RowMeeting, RowMeetings
from hetu_fx.planner.price.link_load import ring_traffic, turn_traffic
from hetu_fx.planner.price.stage_seconds import GATHER, SUM, compute_lines
from hetu_fx.planner.values.exchanged_values import RowSums
from hetu_fx.planner.values.gathered_op import GatheredOp
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Plan, micro_batch_rows, pipeline_rows
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.annotated_graph import CONTEXT, FINE, TENSOR, AnnotatedGraph, StageLayout, stage_nodes
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.layouts.deduce import axis_prices
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.reshard_cost import Prices
from hetu_fx.transforms.layouts.states import WHOLE, AxisState, OperandNeed, SplitOn, Whole
from hetu_fx.transforms.layouts.work_shares import WorkShares, work_shares


def gathered_ops(
    deduced: DeducedGraph, plan: Plan, rows: int | None = None, cluster: Cluster | None = None
) -> tuple[GatheredOp, ...]:
    """Return what a step gathers because no rule splits it, by op; first what takes longest.

    Args:
        deduced: a program with the plan on it.
        plan: that, or one of the same compute layout; its prediction is what shares are of.
        rows: of a step, over all replicas; None: as many as the example has.
        cluster: the devices; None: seconds are not known.
    """
    step = _Step(deduced, plan, rows or example_rows(deduced.annotated.graph), cluster)
    found = [*_of_rows(step), *_inside_stages(step)]
    return tuple(sorted(found, key=lambda one: (-(one.seconds or 0.0), -one.num_bytes, one.line, one.op)))


@dataclass(frozen=True, eq=False)
class _Step:
    """A step of so many rows under a plan."""

    deduced: DeducedGraph
    plan: Plan
    rows: int
    cluster: Cluster | None

    @property
    def annotated(self) -> AnnotatedGraph:
        return self.deduced.annotated

    @property
    def pipeline_rows(self) -> tuple[int, ...]:
        return pipeline_rows(self.rows, self.plan)

    def bytes_of(self, node: fx.Node, rows: int | None = None) -> int:
        """Return the bytes of a value of some rows; None: of all."""
        sizes = sizes_for_rows(self.annotated.graph, self.rows if rows is None else rows)
        return value_bytes(node, partial(meta.evaluate_size, sizes))

    def sent(self, ranks: Sequence[int], num_bytes: float, turns: int) -> float:
        """Return what the device sends that sends most, of what goes round a ring."""
        traffic = (
            ring_traffic([ranks], num_bytes, turns)
            if self.cluster is None
            else turn_traffic(ranks, num_bytes, turns, self.cluster)
        )
        by_sender: dict[int, float] = defaultdict(float)
        for sender, _, size in traffic:
            by_sender[sender] += size
        return max(by_sender.values(), default=0.0)

    def work(self, nodes: Iterable[fx.Node], shares: WorkShares | None = None) -> PartCosts:
        """Return what ops cost per row, of which groups share this; None: nothing."""
        size_of = partial(meta.evaluate_size, sizes_for_rows(self.annotated.graph, self.rows))
        return count_work(self.annotated, nodes, size_of, shares)

    def shares(self) -> WorkShares | None:
        """Return what tensor parallel groups share, as the planner counts it; None where there are none."""
        annotated = self.annotated
        if all(len(stage.devices) == 1 for pipeline in self.plan.pipelines for stage in pipeline.stages):
            return None
        return work_shares(AnalysedGraph(annotated.graph, annotated.factors, annotated.flow), self.plan.split)

    def kind(self, node: fx.Node, known: str, unknown: str) -> str:
        """Return the kind of what is gathered for an op, which is a leaf, or of which a rule is known or not."""
        if node.target is LEAF:
            return "leaf"
        return known if self.annotated.factors.op(node).known else unknown

    def made(
        self, kind: str, node: fx.Node, num_bytes: float, seconds: float | None, repeated: float | None
    ) -> GatheredOp:
        """Return the record of an op."""
        stack, predicted = meta.module_stack(node), self.plan.predicted
        return GatheredOp(
            kind=kind,
            op=told_op(node),
            line=meta.source_line(node),
            rows=self.rows,
            num_bytes=num_bytes,
            path=stack[-1][0] if stack else "",
            source=meta.source_text(node),
            seconds=seconds,
            repeated_seconds=repeated,
            share=seconds / predicted.seconds if seconds is not None and predicted and predicted.seconds else None,
        )


def _of_rows(step: _Step) -> Iterator[GatheredOp]:
    """Yield the ops in which rows of several replicas meet; of a graph of one batch size, the model."""
    ranks = [pipeline.devices[0] for pipeline in step.plan.pipelines]
    found = RowMeetings(step.annotated.graph, step.deduced.batch).found if len(ranks) > 1 else []
    shares = step.shares() if found and step.cluster is not None else None
    if found and step.annotated.graph.fixed_rows is not None:
        every = RowMeeting(
            found[0].op, [n for one in found for n in one.summed], [n for one in found for n in one.work]
        )
        yield replace(_met("fixed batch", every, ranks, step, shares), op="the model", line="", path="", source="")
        return
    for one in found:
        yield _met(step.kind(one.op, "rows", "rows, no rule"), one, ranks, step, shares)


def _met(kind: str, one: RowMeeting, ranks: Sequence[int], step: _Step, shares: WorkShares | None) -> GatheredOp:
    sizes = list(map(step.bytes_of, one.summed))
    sums = RowSums(len(sizes), float(sum(sizes)))
    sent = sum(step.sent(ranks, size, SUM) for size in sizes)
    seconds = None if step.cluster is None else sums.seconds(ranks, step.cluster)
    return step.made(kind, one.op, sent, seconds, _repeated_by_replicas(one.work, step, shares))


def _repeated_by_replicas(nodes: Sequence[fx.Node], step: _Step, shares: WorkShares | None) -> float | None:
    """Return by how much longer ops take that every replica runs on all rows, where that is most."""
    if step.cluster is None:
        return None
    work, cluster = step.work(nodes, shares), step.cluster
    pairs = zip(step.plan.pipelines, step.pipeline_rows, strict=True)
    return max(
        line.slope * (step.rows - own)
        for pipeline, own in pairs
        for line in compute_lines(pipeline.stages[0], work, cluster)
    )


def _inside_stages(step: _Step) -> Iterator[GatheredOp]:
    """Yield the ops that need whole what devices of a stage split."""
    deduced = step.deduced
    for axis, deduction in ((CONTEXT, deduced.context), (TENSOR, deduced.tensor_split), (FINE, deduced.fine)):
        layouts = [layout for layout in deduced.annotated.layouts if layout.axes[axis].ways > 1]
        if layouts:
            yield from _OnAxis(step, axis, deduction, layouts).found()


class _OnAxis:
    """One axis of stages, and those that have it.

    `_forced` is what ops need whole there, each value for the first of them. `_prices` are those of what moves of a
    micro-batch, by its rows.
    """

    def __init__(self, step: _Step, axis: int, deduction: AxisDeduction, layouts: Sequence[StageLayout]) -> None:
        self.step, self.axis, self.deduction, self.layouts = step, axis, deduction, layouts
        self._forced = self._find_forced()
        rows = {self._micro_batches(layout)[0] for layout in layouts}
        self._prices = {one: self._priced(one) for one in rows} if self._forced else {}

    def found(self) -> Iterator[GatheredOp]:
        """Yield the ops."""
        needed = {layout: stage_nodes(self.step.annotated, layout).needed for layout in self.layouts}
        for node, needs in self._forced.items():
            layouts = [layout for layout in self.layouts if node in needed[layout]]
            if layouts:
                yield self._made(node, needs, layouts)

    def _find_forced(self) -> dict[fx.Node, list[OperandNeed]]:
        found: dict[fx.Node, list[OperandNeed]] = {}
        seen: set[fx.Node] = set()
        for node in self.step.annotated.graph.graph.nodes:
            for need in self.deduction.needs(node):
                if need.node not in seen and self._is_forced(node, need):
                    seen.add(need.node)
                    found.setdefault(node, []).append(need)
        return found

    def _lies(self, node: fx.Node) -> AxisState:
        """Return how a value comes out of its op: it may be put together for its readers at once."""
        return self.deduction.made.get(node, self.deduction.states[node])

    def _is_forced(self, node: fx.Node, need: OperandNeed) -> bool:
        """Tell whether an op needs a value whole as its rule, or that it has none, does not let it be cut."""
        op, state = self.step.annotated.factors.op(node), self._lies(need.node)
        if not isinstance(state, SplitOn) or not isinstance(need.state, Whole):
            return False
        return state.factor in op.whole - op.apart.keys()

    def _made(self, node: fx.Node, needs: Sequence[OperandNeed], layouts: Sequence[StageLayout]) -> GatheredOp:
        kind = self.step.kind(node, "whole", "no rule")
        sent = max(self._sent(layout, needs) for layout in layouts)
        is_priced = self.step.cluster is not None
        seconds = max(self._seconds(layout, needs) for layout in layouts) if is_priced else None
        repeated = max(self._repeated(node, layout) for layout in layouts) if is_priced else None
        return self.step.made(kind, node, sent, seconds, repeated)

    def _micro_batches(self, layout: StageLayout) -> tuple[int, int]:
        """Return the rows of a pipeline's largest micro-batch, and how many micro-batches have rows."""
        rows, count = self.step.pipeline_rows[layout.pipeline], self.step.plan.pipelines[layout.pipeline].micro_batches
        return micro_batch_rows(rows, count)[0], min(rows, count)

    def _sent(self, layout: StageLayout, needs: Sequence[OperandNeed]) -> float:
        (rows, count), groups = self._micro_batches(layout), layout.groups(self.axis)
        prices = self._prices[rows]
        turns = {need.node: GATHER * (1 + self.deduction.sums_cotangent(need)) for need in needs}
        return count * max(
            sum(self.step.sent(ranks, prices.num_bytes[node], turn) for node, turn in turns.items()) for ranks in groups
        )

    def _seconds(self, layout: StageLayout, needs: Sequence[OperandNeed]) -> float:
        rows, count = self._micro_batches(layout)
        prices, trained = self._prices[rows], self.step.annotated.flow.differentiable
        return count * sum(
            prices.change(
                need.node,
                self._lies(need.node),
                WHOLE,
                summed=self.deduction.sums_cotangent(need),
                trained=need.node in trained,
            )
            for need in needs
        )

    def _priced(self, rows: int) -> Prices:
        moved = {need.node for needs in self._forced.values() for need in needs}
        nodes = self.step.annotated.graph.graph.nodes
        sizes = [self.step.bytes_of(node, rows) if node in moved else 0 for node in nodes]
        return axis_prices(self.step.annotated, self.axis, self.step.cluster, sizes)

    def _repeated(self, node: fx.Node, layout: StageLayout) -> float:
        """Return by how much longer an op takes that each device of a stage runs whole, where that is most."""
        assert self.step.cluster is not None
        if self.deduction.decisions[node].factor is not None:
            return 0.0
        work, stage = self.step.work([node]), self.step.annotated.stage(layout)
        cut = replace(work, split_flops=work.flops, split_traffic_bytes=work.traffic_bytes)
        rows = self.step.pipeline_rows[layout.pipeline]
        whole, parts = (compute_lines(stage, one, self.step.cluster) for one in (work, cut))
        return max(rows * (line.slope - part.slope) for line, part in zip(whole, parts, strict=True))
