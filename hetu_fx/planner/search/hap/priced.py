"""What plans take by HAP's prices: programs, one group, rows for each device, all by what the passes deduce of them.

`executed` makes a HAP program of the decisions and states of a deduced graph, its moves and work at HAP's prices. A
value that lies whole is COPY, or SHARED where its cotangent comes as summands that nothing adds up there; summands are
PARTIAL. So each edge of the graph at which an op needs a value otherwise than it lies, or gives back summands of a
cotangent, is a change of layout, priced like those of a program that was found. A value is moved once for all readers
that want it alike, as the passes do.

Parameters that lie whole are held as is fastest: whole, or in parts by the first ratios, which are gathered, and whose
gradients are reduced and scattered, as a step begins and ends. What outputs need after the last op is left out, as in
programs that are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from torch import fx

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.deduction.factors.factors import flat
from hetu_fx.errors import PlanError
from hetu_fx.planner.count.graph_problem import GraphProblem, factor_name
from hetu_fx.planner.search.hap.op_forms import OpForm, from_factors
from hetu_fx.planner.search.hap.op_program import HapProgram, HapStep, LayoutChange
from hetu_fx.planner.search.hap.played import PlayedStep
from hetu_fx.planner.search.hap.prices import Collectives, PricedCollective, RatioPrices
from hetu_fx.planner.search.hap.search import program_bytes
from hetu_fx.planner.search.hap.synthesised_program import HapResult
from hetu_fx.planner.search.hap.tensor_states import COPY, PARTIAL, SHARED, Layout, LayoutKind, split
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.planner.values.tensor_program import Op, Tensor
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.layouts.deduce import Deduce
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.flow import is_item
from hetu_fx.transforms.layouts.program_choices import segments
from hetu_fx.transforms.layouts.states import AxisState, OperandNeed, OpStrategy, SplitOn, Whole
from hetu_fx.transforms.layouts.strategies import gives_summands
from hetu_fx.transforms.specialize.specialize import Specialize


def _price_execution(problem: GraphProblem, axis: AxisDeduction, prices: RatioPrices) -> HapProgram:
    """Return what devices do along an axis on which all of them stand, its moves as is fastest at the ratios.

    The prices have the ratios of each segment that parts follow.
    """
    walk = _Walk(problem, axis, prices, dict(zip(problem.nodes, problem.program.ops, strict=True)))
    return HapProgram(tuple(step for node in walk.nodes() for step in walk.visit_op(node)), len(prices.ratios))


@dataclass
class _Walk:
    """Goes through the graph in order; `waiting` are the moves that have come up since the last op.

    So are the homes of parameters but the first `told`: a view of one may stand before what reads it.
    """

    problem: GraphProblem
    axis: AxisDeduction
    prices: RatioPrices
    ops: Mapping[fx.Node, Op]
    waiting: list[LayoutChange] = field(default_factory=list)
    moved: set[tuple[fx.Node | str, Layout]] = field(default_factory=set)
    homes: dict[str, Layout] = field(default_factory=dict)
    told: int = 0

    def nodes(self) -> Iterator[fx.Node]:
        """Yield what makes or views the problem's tensors, up to its last op."""
        for node in self.problem.analysed.graph.graph.nodes:
            if node in self.ops or (node in self.axis.decisions and node in self.problem.sources):
                yield node
            if node is self.problem.nodes[-1]:
                return

    def visit_op(self, node: fx.Node) -> Iterator[HapStep]:
        """Yield what an op is; nothing for a view, whose moves the next op waits for."""
        for need in self.axis.decisions[node].needs:
            self._bring(need)
        if node in self.ops:
            form, homes = self._form(node), tuple(self.homes.items())[self.told :]
            gathered = self.prices.gathered(form, self.problem.program.by_name)
            yield HapStep(self.ops[node], form, homes, tuple(self.waiting), gathered)
            self.waiting, self.told = [], len(self.homes)
        for result in self._results(node):
            self._change(result, self._made(result), self._lies(result))

    def _form(self, node: fx.Node) -> OpForm:
        op, decision = self.ops[node], self.axis.decisions[node]
        reads = tuple(self._wanted(need) for need in decision.needs)
        makes = tuple(self._made(result) or COPY for result in self._results(node))
        flops, cut = self.problem.program.all_flops(op), decision.factor
        if cut is None:
            return OpForm(None, 0, reads, makes, whole_flops=flops)
        name, units = factor_name(cut), self.problem.program.size(op, factor_name(cut))
        form = OpForm(name, decision.segment, reads, makes, cut_flops=flops, units=units)
        ends = [i for i, need in enumerate(decision.needs) if self._is_made_whole(node, decision, need)]
        return from_factors(op, form, ends, self.problem.program) if ends else form

    def _is_made_whole(self, node: fx.Node, decision: OpStrategy, need: OperandNeed) -> bool:
        """Tell whether a gradient that would come in summands is made from gathered factors instead."""
        summing = replace(decision, factors=False)
        return decision.factors and gives_summands(node, summing, need, self.problem.analysed.flow)

    def _bring(self, need: OperandNeed) -> None:
        """Note what brings an operand to how the op needs it."""
        if need.node not in self.problem.sources:
            return
        if self._tensor(need.node).kind == "parameter":
            self._change(need.node, self._home(need.node), self._wanted(need))
        else:
            self._change(need.node, self._lies(need.node), self._wanted(need))

    def _change(self, node: fx.Node, source: Layout | None, target: Layout | None) -> None:
        """Note a change of layout, the first time that it is asked for."""
        if source is None or target is None or source == target:
            return
        tensor = self._tensor(node)
        key = tensor.name if tensor.kind == "parameter" else node, target
        if key in self.moved:
            return
        self.moved.add(key)
        transfers = self._transfers(tensor, source, target)
        self.waiting.append(LayoutChange(tensor.name, source, target, transfers, tensor.kind == "parameter"))

    def _transfers(self, tensor: Tensor, source: Layout, target: Layout) -> tuple[PricedCollective, ...]:
        """Return what changes a layout; parts of one dim become parts of another at once, by whatever ratios."""
        if source.kind is target.kind is LayoutKind.SPLIT and source.dim != target.dim:
            target = target._replace(segment=source.segment)
        return self.prices.change(tensor, source, target) or ()

    def _home(self, node: fx.Node) -> Layout | None:
        """Return how a parameter is held: of what lies whole, the parts too that its changes to all readers ask for."""
        tensor, lies = self._tensor(node), self._layout(node, self.axis.states[node])
        if tensor.name not in self.homes and lies is not None:
            wanted = {self._wanted(n) for user in node.users for n in self.axis.needs(user) if n.node is node}
            homes = [lies, *(split(dim) for dim in range(len(tensor.shape)))] if lies == COPY else [lies]
            self.homes[tensor.name] = min(homes, key=lambda home: self._seconds(tensor, home, wanted))
        return self.homes.get(tensor.name)

    def _seconds(self, tensor: Tensor, home: Layout, wanted: set[Layout | None]) -> float:
        changes = (self.prices.change(tensor, home, layout) for layout in wanted - {None, home} if layout)
        return sum(self.prices.seconds(transfers or ()) for transfers in changes)

    def _wanted(self, need: OperandNeed) -> Layout | None:
        return self._layout(need.node, need.state, summed=need.summed_cotangent)

    def _made(self, node: fx.Node) -> Layout | None:
        """Return how a value comes out of its op."""
        return self._layout(node, self.axis.made[node], summed=node in self.axis.summed_cotangents)

    def _lies(self, node: fx.Node) -> Layout | None:
        """Return how a value lies for its readers."""
        return self._layout(node, self.axis.states[node], summed=node in self.axis.summed_cotangents)

    def _layout(self, node: fx.Node, state: AxisState, *, summed: bool = False) -> Layout | None:
        """Return the layout of a value in a state; None of what every device has anyway."""
        if node not in self.problem.sources or (tensor := self._tensor(node)).kind == "input":
            return None
        match state:
            case SplitOn(factor, segment):
                return split(flat(self.problem.sources[node][1]).index(factor), segment)
            case Whole():
                return SHARED if summed and tensor.has_gradient else COPY
            case _:
                return PARTIAL

    def _tensor(self, node: fx.Node) -> Tensor:
        return self.problem.program.by_name[self.problem.sources[node][0]]

    def _results(self, node: fx.Node) -> list[fx.Node]:
        return [node] if node in self.problem.sources else list(filter(is_item, node.users))


def price_plan_run(problem: GraphProblem, plan: Plan, deduced: DeducedGraph, cluster: Cluster) -> HapResult:
    """Return the program that a plan runs on its devices, at its ratios (of each segment), with its seconds.

    Raises `PlanError` for a plan of stages or of grids, which is no program of all devices.
    """
    axis, shares = _axis(plan, deduced)
    cluster = cluster.without([rank for rank in cluster.ranks if rank not in plan.devices])
    devices = [cluster.device(rank) for rank in plan.devices]
    program = problem.program.at(fmean(device.flops_per_byte for device in devices))
    speeds = tuple(device.speed for device in devices)
    ratios = tuple(tuple(share / sum(each) for share in each) for each in shares)
    prices = RatioPrices(speeds, Collectives.of_cluster(cluster), ratios)
    found = _price_execution(replace(problem, program=program), axis, prices)
    return HapResult(
        program=found,
        ratios=ratios,
        seconds=found.seconds(speeds, ratios),
        ranks=plan.devices,
        speeds=speeds,
        held=program_bytes(found, program, zero=plan.zero),
    )


def deduce_plan(problem: GraphProblem, plan: Plan, cluster: Cluster) -> DeducedGraph:
    """Return the graph that a plan runs; raises what the passes raise for a plan that they refuse."""
    return Deduce(cluster)(Annotate(plan, wants_values=False)(problem.analysed))


def played_step(problem: GraphProblem, plan: Plan, costs: ProgramCosts, cluster: Cluster) -> PlayedStep:
    """Return a step under a plan with a program, on paper, which others are simulated for.

    `costs` are those of the program. Raises as `deduce_plan` and `price_plan_run` do, and where no graph of a
    device is made.
    """
    deduced = deduce_plan(problem, plan, cluster)
    Specialize(plan.devices[0])(deduced)
    run = price_plan_run(problem, plan, deduced, cluster)
    return PlayedStep(run, problem.program.by_name, costs, cluster, plan.zero)


def _axis(plan: Plan, deduced: DeducedGraph) -> tuple[AxisDeduction, tuple[tuple[int, ...], ...]]:
    """Return the axis that all devices of a plan stand along, and their shares in each segment."""
    stages = [stage for *_, stage in plan.stages]
    if all(len(pipeline.stages) == 1 and pipeline.micro_batches == 1 for pipeline in plan.pipelines):
        if all(len(stage.devices) == 1 for stage in stages):
            return deduced.batch, (tuple(pipeline.share for pipeline in plan.pipelines),)
        if len(stages) == 1 and not stages[0].is_grid:
            layout = deduced.annotated.layouts[0]
            along = [axis for axis, each in zip(deduced.inside(layout), layout.axes, strict=True) if each.ways > 1]
            if len(along) == 1:
                return along[0], segments(stages[0])
    raise PlanError(
        f"plan {plan.summary()} is no program of all devices together\nhint: give rows to single devices, or one stage"
    )
