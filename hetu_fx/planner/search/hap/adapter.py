"""The HAP search, as the table of searches knows it: plans that carry its program, and plans near it.

HAP plans op by op. A plan with a program says that op by op too; others say how all devices share rows,
or what one group of them splits. Those that come nearest are found by HAP's own prices, with their shares, and priced
once more by the cost of all searches, for what their groups split. What a plan with a program runs is taken from the
passes (`executed`), and its step is played on paper (`played`), as those of other plans are: HAP's prices know work and
exchanges alone, and not what a step takes besides. So a program that sends factors is asked for without them too, and
each with parameters in parts and on every device. What the program says and a plan cannot is noted on the plan.

In a program of a plan a factor is named by a dim of a parameter or an input that has it, of one that the op reads if
there is such. Ops of repeated blocks that do the same are one region, whose numbers are `*`. What the loss does not
need is done whole. Views are left out, and what parameters do not reach: they follow what they are of.

The plan that runs a HAP program, or the nearest one that a plan can say, with what that loses. A plan says two things
of all devices together: rows for each (data parallel), or one tensor parallel group that splits certain factors
wherever they stand, and, if asked to, the sequence where it splits none of them. A HAP program may mix these op by op.
So each of the two is searched again, with nothing else allowed, and the faster one is taken. What that costs more than
the program is the loss. Factors' names must mean the same in all ops, as `count.graph_problem_of` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase as fnmatch
from functools import partial
from typing import TypeVar

from torch import fx

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.deduction.factors.factors import FactorClass
from hetu_fx.deduction.rules.forms import OnMissingFactor
from hetu_fx.errors import DeductionError, PlanError, ResolveError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Leaf, LeafKind
from hetu_fx.planner.count.graph_problem import GraphProblem, factor_name
from hetu_fx.planner.price.step import memory_problems
from hetu_fx.planner.search.hap.op_forms import SynthesisRules
from hetu_fx.planner.search.hap.op_program import HapStep
from hetu_fx.planner.search.hap.prices import Collectives, round_shares
from hetu_fx.planner.search.hap.search import MOST_ROUNDS, search
from hetu_fx.planner.search.hap.synthesised_program import HapResult
from hetu_fx.planner.search.hap.tensor_states import PARTIAL
from hetu_fx.planner.search.problem import Candidates, CapturedCosts, Problem
from hetu_fx.planner.values.tensor_program import Op, Tensor, TensorProgram
from hetu_fx.plans.op_regions import ROWS, SUMMANDS, WHOLE, LeafDim, OpRegion
from hetu_fx.plans.plan import Pipeline, Plan
from hetu_fx.plans.prediction import Prediction
from hetu_fx.plans.stage import Stage
from hetu_fx.transforms.layouts.flow import is_item
from hetu_fx.transforms.layouts.program_choices import only_rearranges, op_names

PARTS = 100
"""Ratios of a tensor parallel group add up to about so many."""

FactorSet = frozenset[str]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Translation:
    """A plan and what it takes.

    Attributes:
        plan: the plan.
        result: the program that the plan runs, at its own ratios.
        seconds: of a step, at the plan's whole-number ratios, by the same prices as the program's.
        loss_seconds: by how much that is above the program that was translated.
        why: what could not be said, if something.
    """

    plan: Plan
    result: HapResult
    seconds: float
    loss_seconds: float
    why: str


def translations(
    problem: TensorProgram,
    result: HapResult,
    cluster: Cluster,
    *,
    collectives: Collectives | None = None,
    memory_fraction: float = 0.9,
    zero: int = 1,
) -> tuple[Translation, ...]:
    """Return the plans that come near to a HAP program, those that take least seconds by its prices first.

    Raises `PlanError` when neither data nor tensor parallelism of all devices fits their memory.
    """
    ask = _Ask(problem.in_one_segment(), result, cluster, collectives, memory_fraction, zero)
    refusals: list[str] = []

    def tried(way: Callable[[], T]) -> list[T]:
        try:
            return [way()]
        except PlanError as refusal:
            refusals.append(str(refusal))
            return []

    found = tried(ask.data_parallel)
    for split in tried(ask.split):
        found += [*tried(partial(ask.group, split)), *tried(partial(ask.with_sequence, split))]
    if not found:
        raise PlanError(f"no plan can say what the program does: {'; '.join(dict.fromkeys(refusals))}")
    return tuple(sorted(found, key=lambda each: each.seconds))


@dataclass(frozen=True, slots=True)
class _Ask:
    """The program to translate, and the ways to say something like it."""

    problem: TensorProgram
    result: HapResult
    cluster: Cluster
    collectives: Collectives | None
    memory_fraction: float
    zero: int

    def data_parallel(self) -> Translation:
        """Return the plan of a pipeline per device, each with its rows."""
        total = max((t.shape[t.row_dim] for t in self.problem.tensors if t.row_dim is not None), default=0)
        if not total:
            raise PlanError("no tensor of the program has rows of the batch")
        allowed = {op.name: _row_factors(op, self.problem) for op in self.problem.ops}
        found = self._search(_confined(self.problem, allowed))
        shares = round_shares(found.ratios[0], total)
        pairs = zip(self.cluster.ranks, shares, strict=True)
        pipelines = tuple(Pipeline((Stage((rank,)),), share=rows) for rank, rows in pairs if rows)
        return self._told(Plan(pipelines, zero=self.zero), found, shares)

    def split(self) -> FactorSet:
        """Return the factors of parameters that the best program cuts that cuts no rows."""
        ops = (replace(op, whole=op.whole | _row_factors(op, self.problem)) for op in self.problem.ops)
        split = _split_factors(self.problem, self._search(replace(self.problem, ops=tuple(ops))))
        if not split:
            raise PlanError("the program splits no factor of a parameter")
        return split

    def with_sequence(self, split: FactorSet) -> Translation:
        """Return the plan of one group that splits these, and shares the sequence besides."""
        carried = _carried_factors(self.problem)
        if not carried:
            raise PlanError("the program has no sequence")
        return self.group(split, carried)

    def group(self, split: FactorSet, carried: FactorSet = frozenset()) -> Translation:
        """Return the plan of one group that splits these factors, and carried ones where it splits none of them."""
        ops = self.problem.ops
        allowed = {op.name: frozenset(op.factors) & split or frozenset(op.factors) & carried for op in ops}
        found = self._search(_confined(self.problem, allowed, split))
        asked, pipelines = tuple(_asked_for(self.problem, split)), _one_group(found, PARTS)
        plan = Plan(pipelines, zero=self.zero, split=asked, sequence_parallel=bool(carried))
        return self._told(plan, found, round_shares(found.ratios[0], PARTS))

    def _told(self, plan: Plan, found: HapResult, shares: Sequence[int]) -> Translation:
        ratios = tuple(share / sum(shares) for share in shares)
        seconds = found.program.seconds(found.speeds, (ratios,) * len(found.ratios))
        loss = seconds - self.result.seconds
        return Translation(plan, found, seconds, loss, _why(plan, self.problem, self.result, loss))

    def _search(self, problem: TensorProgram) -> HapResult:
        return search(
            problem,
            self.cluster,
            collectives=self.collectives,
            memory_fraction=self.memory_fraction,
            zero=self.zero,
        )


def _one_group(found: HapResult, parts: int) -> tuple[Pipeline]:
    """Return one group with shares of whole parts; devices whose share is none are left out."""
    pairs = zip(found.ranks, round_shares(found.ratios[0], parts), strict=True)
    ranks, shares = zip(*((rank, share) for rank, share in pairs if share), strict=True)
    return (Pipeline((Stage(ranks, shares),)),)


def _confined(problem: TensorProgram, allowed: dict[str, FactorSet], forced: FactorSet | None = None) -> TensorProgram:
    """Return the problem with no op cut on anything else; one that can be cut on a forced factor is."""
    ops = []
    for op in problem.ops:
        may = allowed[op.name] - op.whole
        must = may if forced is None else may & forced
        whole = op.whole | (frozenset(op.factors) - may)
        ops.append(replace(op, whole=whole, copyable=not must))
    return replace(problem, ops=tuple(ops))


def _row_factors(op: Op, problem: TensorProgram) -> FactorSet:
    """Return the factors of an op that are rows of the batch."""
    return frozenset(
        factors[tensor.row_dim] for tensor, factors in _tensor_places(op, problem) if tensor.row_dim is not None
    )


def _of_parameters(problem: TensorProgram) -> FactorSet:
    places = (place for op in problem.ops for place in _tensor_places(op, problem))
    return frozenset(name for tensor, factors in places if tensor.kind == "parameter" for name in factors)


def _split_factors(problem: TensorProgram, result: HapResult) -> FactorSet:
    """Return the factors of parameters that the program cuts, without those that rival more work in some op."""
    of_parameters = _of_parameters(problem)
    flops: dict[str, float] = {}
    for step in result.program.steps:
        if step.form.cut in of_parameters:
            flops[str(step.form.cut)] = flops.get(str(step.form.cut), 0.0) + step.form.cut_flops
    chosen: list[str] = []
    for factor in sorted(flops, key=lambda name: (-flops[name], name)):
        if not any(_are_rivals(factor, other, problem) for other in chosen):
            chosen.append(factor)
    return frozenset(chosen)


def _carried_factors(problem: TensorProgram) -> FactorSet:
    """Return the factors that no parameter has and that are no rows: sequences."""
    rows = {factor for op in problem.ops for factor in _row_factors(op, problem)}
    return frozenset(factor for op in problem.ops for factor in op.factors) - rows - _of_parameters(problem)


def _asked_for(problem: TensorProgram, split: FactorSet) -> Iterator[tuple[str, int]]:
    """Yield (parameter, its dim in the model) for each factor that stands alone in some dim of a parameter."""
    told: set[str] = set()
    for op in problem.ops:
        for tensor, factors in _tensor_places(op, problem):
            for factor, dim in zip(factors, tensor.origin, strict=True):
                is_alone = tensor.kind == "parameter" and tensor.origin.count(dim) == 1
                if is_alone and factor in split - told:
                    told.add(factor)
                    yield tensor.name, dim


def _are_rivals(one: str, other: str, problem: TensorProgram) -> bool:
    return any({one, other} <= set(op.factors) - op.whole for op in problem.ops)


def _tensor_places(op: Op, problem: TensorProgram) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
    pairs = zip((*op.reads, *op.makes), (*op.operands, *op.results), strict=True)
    return ((problem.by_name[name], factors) for name, factors in pairs)


def _why(plan: Plan, problem: TensorProgram, result: HapResult, loss: float) -> str:
    said = "data parallel" if len(plan.pipelines) > 1 else "tensor parallel"
    if plan.sequence_parallel:
        said += " with the sequence"
    if loss <= 1e-3 * result.seconds:
        return f"{said}: all that matters of the program can be said"
    cuts = [bool(step.form.cut in _row_factors(step.op, problem)) for step in result.program.steps if step.form.cut]
    mixed = any(cuts) and not all(cuts)
    reason = (
        "rows are cut in some ops and parameters in others" if mixed else "ops of one kind are done in several ways"
    )
    return f"{said} loses {loss:.4g} s of {result.seconds:.4g} s: {reason}, which no plan can say"


def find_plans(problem: Problem) -> Candidates:
    """Return the plan that carries HAP's program, and plans near it, that fit; none if it finds none, and says why."""
    return _found(problem, MOST_ROUNDS, near=True)


def find_programs(problem: Problem) -> Candidates:
    """Return the plans that carry HAP's program alone, found in one round; none if it finds none, and says why."""
    return _found(problem, 1, near=False)


def _found(problem: Problem, rounds: int, *, near: bool) -> Candidates:
    captured = problem.captured
    assert captured is not None, "the table refuses problems without a graph"
    try:
        result = _searched(captured, problem, rounds=rounds)
        found = list(_translations(captured, result, problem)) if near else []
    except PlanError as refusal:
        problem.tell(f"hap: {refusal}")
        return {}
    plans = [plan for each in found for plan in _plans(each, captured, problem)]
    fitting = dict(fitted for fitted in map(problem.fit_memory, plans) if fitted is not None)
    return fitting | dict(_with_programs(captured, result, problem, rounds=rounds))


def _searched(captured: CapturedCosts, problem: Problem, *, rounds: int, factors: bool = True) -> HapResult:
    """Return HAP's program, of what can be said."""
    options, program = problem.options, is_expressible(captured.hap)
    return search(
        program,
        problem.cluster,
        rules=SynthesisRules(sufficient_factors=factors),
        memory_fraction=options.memory_fraction,
        zero=options.zero,
        rounds=rounds,
    )


def _with_programs(
    captured: CapturedCosts, result: HapResult, problem: Problem, *, rounds: int
) -> Iterator[tuple[Plan, float]]:
    """Yield the plans that carry a program, with their seconds, if the passes run them and they fit.

    Of a program with its parameters in parts, and on every device, the faster one.
    """
    if not problem.options.tensor_parallel or "program" in problem.options.off:
        return
    sends = any(step.form.gathered for step in result.program.steps)
    for each in (result, *([_searched(captured, problem, factors=False, rounds=rounds)] if sends else [])):
        try:
            stage = hap_stage(captured.hap, each)
        except PlanError as refusal:
            problem.tell(f"hap: its program cannot be said: {refusal}")
            continue
        whole = problem.plan([Pipeline((stage,))])
        plans = (replace(whole, zero=zero) for zero in range(problem.options.zero, -1, -1))
        priced = [found for plan in plans for found in _with_program(plan, captured, each, problem)]
        yield from sorted(priced, key=lambda found: found[1])[:1]


def _with_program(
    plan: Plan, captured: CapturedCosts, result: HapResult, problem: Problem
) -> Iterator[tuple[Plan, float]]:
    try:
        expected = captured.expect(plan, problem.cluster)
    except (PlanError, DeductionError, ResolveError) as refusal:
        problem.tell(f"hap: its program does not run: {refusal}")
        return
    if problem.options.refused(plan) or memory_problems(expected, problem.cluster, problem.options.memory_fraction):
        return
    problem.priced.add(expected.seconds, is_roomy=True)
    why = f"hap, by its own prices: the program that was found takes {result.seconds:.4g} s: {result.why}"
    yield replace(plan, predicted=Prediction(expected.seconds, why=why)), expected.seconds


def _translations(captured: CapturedCosts, result: HapResult, problem: Problem) -> Iterator[Translation]:
    options = problem.options
    near = translations(
        captured.hap.program, result, problem.cluster, memory_fraction=options.memory_fraction, zero=options.zero
    )
    yield from (each for each in near if options.sequence_parallel or not each.plan.sequence_parallel)


def _plans(found: Translation, captured: CapturedCosts, problem: Problem) -> Iterator[Plan]:
    """Yield the plan that was found, as the runtime has it: with whole parts of what is split, if there are enough."""
    plan, options = found.plan, problem.options
    if len(plan.pipelines) > 1 or len(plan.devices) == 1:
        yield _noted(plan, found, problem)
    elif options.tensor_parallel:
        costs = captured.costs_of(plan.split) if plan.split else problem.costs
        split = plan.split if costs != problem.costs else ()
        pipelines = _one_group(found.result, min(PARTS, costs.units))
        if len(pipelines[0].devices) > 1:
            yield _noted(replace(plan, pipelines=pipelines, split=split), found, problem)


def _noted(plan: Plan, found: Translation, problem: Problem) -> Plan:
    note = Prediction(found.seconds, why=f"hap, by its own prices: {found.why}")
    return replace(plan, name=problem.options.name, max_length=problem.options.max_length, predicted=note)


_NUMBER = re.compile(r"\.\d+(?=\.|$)")


_DENOMINATORS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 50, 100, 200, 500, 1000)
"""Ratios are whole numbers that add up to one of these for each device."""

NEGLIGIBLE = 0.002
"""Ratios of smaller numbers are taken where the program takes longer by no more than this part."""


def hap_stage(problem: GraphProblem, result: HapResult) -> Stage:
    """Return the stage of all devices that runs a program, its ratios small whole numbers.

    Devices that no segment gives a part are left out. Raises `PlanError` for a factor that no parameter and no input
    has (see `sayable`), and where fewer than two devices are left.
    """
    shares = _whole(result)
    places = [place for place, each in enumerate(zip(*shares, strict=True)) if any(each)]
    if len(places) < 2:
        raise PlanError(f"ratios {result.ratios} leave one device all of the program\nhint: use a plan of one device")
    ratios = [tuple(segment[place] for place in places) for segment in shares]
    common = next((each for each in ratios if all(each)), (1,) * len(places))
    classes = {factor_name(c): c for c in problem.analysed.factors.classes}
    regions = _Regions(problem, tuple(() if each == common else each for each in ratios), classes)
    program = regions.of(result.program.steps)
    return Stage(tuple(result.ranks[place] for place in places), common, program=program)


def _whole(result: HapResult) -> tuple[tuple[int, ...], ...]:
    """Return the ratios of each segment in the smallest numbers that lose next to nothing."""
    for parts in _DENOMINATORS:
        shares = tuple(round_shares(ratios, parts * len(ratios)) for ratios in result.ratios)
        ratios = tuple(tuple(share / sum(each) for share in each) for each in shares)
        if result.program.seconds(result.speeds, ratios) <= result.seconds * (1 + NEGLIGIBLE):
            break
    return shares


def is_expressible(problem: GraphProblem) -> TensorProgram:
    """Return the problem in which no op is cut on what a program cannot name."""
    known = frozenset(factor_name(c) for c in problem.analysed.factors.classes if c.is_batch or _places(problem, c))
    ops = (replace(op, whole=op.whole | (frozenset(op.factors) - known)) for op in problem.program.ops)
    return replace(problem.program, ops=tuple(ops))


def _places(problem: GraphProblem, factor: FactorClass) -> list[tuple[Leaf, int]]:
    """Return the dims of parameters and inputs that a factor stands in."""
    found = problem.analysed.factors.leaf_dims(factor)
    return [(leaf, dim) for leaf, dim in found if leaf.kind in (LeafKind.PARAMETER, LeafKind.INPUT)]


@dataclass(frozen=True, eq=False)
class _Regions:
    """Says steps as regions.

    `ratios` are those of each segment, () where they are the stage's; `classes` are those of factors by name.
    """

    problem: GraphProblem
    ratios: Sequence[tuple[int, ...]]
    classes: Mapping[str, FactorClass]

    def of(self, steps: Sequence[HapStep]) -> tuple[OpRegion, ...]:
        """Return the regions, such that the first that matches an op says what its step does."""
        names = op_names(self.problem.analysed.graph)
        nodes = {names[node]: node for node in self.problem.nodes}
        sums = self._sums(steps)
        pairs = zip(nodes.items(), steps, strict=True)
        exact = [self._region(name, node, step, sums) for (name, node), step in pairs]
        rest = [node for node in names if self._is_beside(node)]
        exact += [OpRegion(names[node], WHOLE) for node in rest]
        folded = list(self._folded(exact, nodes | {names[node]: node for node in rest}))
        strays = (own for own in exact if not _is_told(own, folded))
        return (*strays, *folded)

    def _is_beside(self, node: fx.Node) -> bool:
        """Tell whether an op, and no view, is none of the problem's, as the loss does not need it."""
        analysed, sources = self.problem.analysed, self.problem.sources
        is_op = analysed.factors.is_op(node) and meta.has_tensor(node) and node not in self.problem.nodes
        is_left = is_op and analysed.flow.is_mixed(node) and not is_item(node) and node not in sources
        return is_left and not only_rearranges(node, analysed.factors.op(node))

    def _sums(self, steps: Sequence[HapStep]) -> frozenset[str]:
        """Return the tensors that come in summands: without those that ops which look across a factor add up."""
        sums: set[str] = set()
        for node, step in zip(self.problem.nodes, steps, strict=True):
            adds_up = step.form.cut is not None and self._adds_up(node, self.classes[step.form.cut])
            of_none = step.form.cut is None and sums.isdisjoint(step.op.reads)
            if not adds_up and not of_none:
                made = zip(step.op.makes, step.form.makes, strict=True)
                sums |= {name for name, layout in made if layout == PARTIAL}
        return frozenset(sums)

    def _adds_up(self, node: fx.Node, factor: FactorClass) -> bool:
        op = self.problem.analysed.factors.op(node)
        form = op.traits.sharded if factor in op.sharded else None
        return form is not None and form.lacking is OnMissingFactor.WHOLE

    def _region(self, name: str, node: fx.Node, step: HapStep, sums: frozenset[str]) -> OpRegion:
        form = step.form
        if form.cut is None:
            given = (tensor for tensor, layout in zip(step.op.reads, form.reads, strict=True) if layout == PARTIAL)
            return OpRegion(name, WHOLE if sums.isdisjoint(given) else SUMMANDS)
        split = self._split(node, self.classes[form.cut])
        return OpRegion(name, split, self.ratios[form.segment], bool(form.gathered))

    def _split(self, node: fx.Node, factor: FactorClass) -> str:
        if factor.is_batch:
            return ROWS
        graph = self.problem.analysed.graph
        reads = {self.problem.sources[o.node][0] for o in self.problem.analysed.factors.op(node).operands}
        owner = graph.block_of(node)

        def is_far(place: tuple[Leaf, int]) -> tuple[bool, bool]:
            leaf, _ = place
            return leaf.name not in reads, owner not in map(graph.block_of, leaf.node.users)

        leaf, dim = min(_places(self.problem, factor), key=is_far)
        classes = self.problem.analysed.factors.dims(leaf.node)[dim]
        return str(LeafDim(leaf.name, dim, classes.index(factor) if len(classes) > 1 else None))

    def _folded(self, exact: Sequence[OpRegion], nodes: Mapping[str, fx.Node]) -> Iterator[OpRegion]:
        """Yield a region for ops of several blocks that do the same, or one for each; the longest patterns first."""
        twins: dict[str, list[OpRegion]] = {}
        for region in exact:
            twins.setdefault(_starred(region.ops), []).append(region)
        for pattern in sorted(twins, key=lambda pattern: (-len(pattern.replace("*", "")), pattern)):
            alike = {replace(one, ops=pattern, split=_starred(one.split)) for one in twins[pattern]}
            one = next(iter(alike))
            is_same = len(alike) == 1 < len(twins[pattern])
            if is_same and all(self._means(one, own, nodes[own.ops]) for own in twins[pattern]):
                yield one
            else:
                yield from twins[pattern]

    def _means(self, region: OpRegion, own: OpRegion, node: fx.Node) -> bool:
        """Tell whether a region of several ops says of one what its own does."""
        reached = self.problem.analysed.factors.op(node).classes
        return self._named(region) & reached == self._named(own) & reached

    def _named(self, region: OpRegion) -> frozenset[FactorClass]:
        named = region.leaf_dim
        if named is None:
            return frozenset()
        factors = self.problem.analysed.factors
        leaves = (leaf for leaf in factors.leaves if fnmatch(leaf.name, named.leaf))
        dims = (factors.dims(leaf.node) for leaf in leaves)
        found = (dim[named.dim] for dim in dims if named.dim < len(dim))
        return frozenset(c for classes in found for i, c in enumerate(classes) if named.factor in (None, i))


def _is_told(own: OpRegion, regions: Sequence[OpRegion]) -> bool:
    """Tell whether the first region that matches an op is its own, or the one that it was folded into."""
    first = next(region for region in regions if fnmatch(own.ops, region.ops))
    return first == own or replace(own, ops=_starred(own.ops), split=_starred(own.split)) == first


def _starred(name: str) -> str:
    """Return the name of an op, or of a leaf with a dim, with `*` for the numbers of modules."""
    path, mark, rest = name.partition(":")
    return _NUMBER.sub(".*", path) + mark + rest
