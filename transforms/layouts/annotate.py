"""Put a plan on a graph: the stage of every op, the devices of every stage, and the part that each of them has.

Ops that both the batch and parameters reach belong to one stage each. Everything else (masks, rotary tables,
transposed weights) belongs to none and is computed wherever it is read, so that it never travels.

Which factor classes tensor-parallel groups split is chosen once per graph, from the rules alone: a class is worth
splitting when splitting it spreads many FLOPs for few communicated elements. On a transformer this yields key-value
heads, the feed-forward width and the vocabulary, which is Megatron's choice; on other models whatever the same ratio
says.

Tensor parallel groups of more devices than a class has parts: what each part is cut in besides. Grouped heads are the
case: k key-value heads, each with r heads of queries. A group of k s devices cuts the key-value heads in k, one each,
and what stands inside of each in s: its heads of queries (the fine axis). Keys and values, which lack those, are whole
there: the s devices that share a key-value head make the same ones, and their gradients come out as summands, as the
rules say for any operand that lacks what its op is cut on. What else the group splits is seen as (k, the rest), so that
both axes cut it; what ops look across (a vocabulary) is cut in k alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase as fnmatch
from itertools import count
from typing import ClassVar

from torch import fx

from hetu_fx.deduction.factors.factors import ClassDims, FactorClass, FactorMap, OpFactors
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.plans.plan import Plan, Stage
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.annotated_graph import ALONE, AnnotatedGraph, StageAxis, StageLayout, cut_stages
from hetu_fx.transforms.layouts.exchange import exchanged_classes
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.program_choices import program_choices, segments
from hetu_fx.transforms.layouts.reshard_cost import product_flops
from hetu_fx.transforms.layouts.sequence_parallel import sequence_classes, shares

Splits = frozenset[FactorClass]
Rivals = Callable[[Graph, FactorMap], Mapping[FactorClass, set[FactorClass]]]


@dataclass(frozen=True, eq=False)
class FinerCut:
    """What groups split on the tensor axis, in `ways` parts at most, and what on the fine one.

    `factors` has the classes that both cut as two.
    """

    factors: FactorMap
    ways: int
    coarse: Splits
    fine: Splits

    def ratios(self, stage: Stage) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ratios of both axes for a stage of more devices than `ways`.

        Raises:
            PlanError: they are no whole multiple, or those that share a part are not cut alike.
        """
        _, given = stage.axes
        inner = given[: len(given) // self.ways]
        if inner * self.ways != given:
            raise PlanError(
                f"stage on devices {list(stage.devices)} splits what has {self.ways} parts over {len(given)} devices "
                f"with ratios {list(given)}\nhint: give a multiple of {self.ways} devices, the same ratios to those "
                f"that share each part, or at most {self.ways} devices"
            )
        return (1,) * self.ways, inner


def _finer_cut(graph: Graph, factors: FactorMap, classes: Splits, rivals: Rivals, widest: int) -> FinerCut | None:
    """Return how a group of `widest` devices cuts classes that have fewer parts; None where none does, or none can."""
    small = {c for c in classes if (c.size or 0) < widest}
    ways = {c.size for c in small}
    if len(ways) != 1:
        return None
    (size,) = ways
    assert size is not None
    beside = rivals(graph, factors)
    inner = {c: _inside(c, beside[c], widest // size, factors) for c in small}
    if None in inner.values():
        return None
    others = {c for c in classes - small if (c.size or 0) % size == 0 and (c.size or 0) >= widest}
    pairs = _pairs_of([c for c in others if is_plain(c, factors)], size, factors)
    coarse = (classes - pairs.keys()) | {outer for outer, _ in pairs.values()}
    fine = {c for c in inner.values() if c is not None} | {within for _, within in pairs.values()}
    return FinerCut(_refine_factors(factors, pairs), size, frozenset(coarse), frozenset(fine))


def _inside(factor: FactorClass, beside: set[FactorClass], parts: int, factors: FactorMap) -> FactorClass | None:
    """Return the class that stands between one and what is inside of both in a parameter, with as many parts to cut."""
    leaves = [leaf for leaf in factors.leaves if leaf.kind is LeafKind.PARAMETER]
    dims = [dim for leaf in leaves for dim in factors.dims(leaf.node) if factor in dim[:-2]]
    found = {dim[dim.index(factor) + 1] for dim in dims} & beside
    able = [c for c in found if (c.size or 0) >= parts and is_plain(c, factors) and _is_shared_out(c, factor, factors)]
    return min(able, key=lambda c: c.id, default=None)


def _is_shared_out(inner: FactorClass, factor: FactorClass, factors: FactorMap) -> bool:
    """Tell whether no op sums over the inner class but together with the outer one, as a projection of heads does."""
    return all(factor in op.reduced for op in factors.ops if inner in op.reduced)


Pairs = Mapping[FactorClass, tuple[FactorClass, FactorClass]]
"""Classes with the outer and the inner one that stand for them."""


def _pairs_of(classes: Iterable[FactorClass], outer: int, factors: FactorMap) -> Pairs:
    """Return new classes, the outer ones of size `outer`, for each of these, whose size it divides."""
    found: dict[FactorClass, tuple[FactorClass, FactorClass]] = {}
    for number, factor in zip(count(len(factors.classes), 2), sorted(classes, key=lambda c: c.id), strict=False):
        assert factor.size is not None
        found[factor] = _numbered(number, outer), _numbered(number + 1, factor.size // outer)
    return found


def _numbered(number: int, size: int) -> FactorClass:
    return FactorClass(number, size, False, str(size), size)


def is_plain(factor: FactorClass, factors: FactorMap) -> bool:
    """Tell whether no op has a form of its own for where a class is cut, so that it can be seen as two."""
    special = (op for op in factors.ops if factor in op.classes and _is_special(factor, op))
    return factors.splittable(factor) and next(special, None) is None


def _is_special(factor: FactorClass, op: OpFactors) -> bool:
    return factor in op.sharded | op.placed | op.averaged or factor in op.apart or factor in op.travelling.values()


def _refine_factors(factors: FactorMap, pairs: Pairs) -> FactorMap:
    """Return the map with classes seen as pairs."""
    if not pairs:
        return factors

    def dims(given: ClassDims) -> ClassDims:
        return tuple(tuple(one for factor in dim for one in pairs.get(factor, (factor,))) for dim in given)

    def classes(given: Iterable[FactorClass]) -> frozenset[FactorClass]:
        return frozenset(one for factor in given for one in pairs.get(factor, (factor,)))

    def op(given: OpFactors) -> OpFactors:
        return replace(
            given,
            operands=tuple(replace(operand, dims=dims(operand.dims)) for operand in given.operands),
            results=tuple(map(dims, given.results)),
            reduced=classes(given.reduced),
            whole=classes(given.whole),
            size_args=tuple(replace(size, classes=dims((size.classes,))[0]) for size in given.size_args),
            apart={factor: op(seen) for factor, seen in given.apart.items()},
        )

    found = tuple(one for pair in pairs.values() for one in pair)
    return factors.seen((*factors.classes, *found), dims, op)


# A class whose FLOPs per communicated element are below this share of what most FLOPs have is left whole: splitting
# the hidden width, say, spreads every projection but communicates every activation.
_WORTH = 0.2

# Elements that a sharded form communicates for each row of a sharded factor: its normalizer and what it picks.
_PER_ROW = 3


@dataclass(frozen=True)
class Annotate:
    """Put a plan on a graph: stages, devices, and the parts of the split classes.

    Requires: an analysed graph. The plan's devices, blocks and splits are ones that the graph has.
    Ensures: every op that batch and parameters both reach has a stage in each pipeline; every stage knows its parts.
        The classes that tensor parallel groups split are those that spread most work for least communication, after
        those that the plan's `split` asks for: beside these what has too few parts (heads, say) stays whole.

        %up = linear(%x, %w_up)         ->      %up: stage 0.0     on devices [0, 1], each a part of the dim of %w_up
        %loss = mean(%y)                        %loss: stage 0.1   on device [2]
    """

    plan: Plan
    wants_values: bool = True
    name: ClassVar[str] = "annotate"

    def __call__(self, analysed: AnalysedGraph) -> AnnotatedGraph:
        if self.plan.has_program:
            return self._with_program(analysed)
        graph, factors, flow = analysed.graph, analysed.factors, analysed.flow
        wanted = (
            tensor_classes(graph, factors, flow, classes_to_split(self.plan, factors))
            if self._is_split
            else frozenset()
        )
        classes = self._classes(graph, factors, wanted)
        finer = _finer_cut(graph, factors, classes, _rivals, self._widest)
        if self.plan.split and (finer is None or self._widest % finer.ways):
            classes, finer = self._large_enough(classes, factors), None
        if finer is not None:
            factors, classes, wanted = finer.factors, finer.coarse, finer.coarse
        sequence = self._sequence(graph, factors, flow, classes, wanted)
        pipelines = self.plan.parts(graph.num_blocks)
        stage_of = tuple(cut_stages(graph, flow, pipeline.blocks) for pipeline in pipelines)
        is_exchanged = self.plan.attention == "heads"
        exchanges = exchanged_classes(graph, factors) if is_exchanged else frozenset[FactorClass]()
        layouts = tuple(
            tuple(
                _layout(p, s, stage, classes, sequence, factors, finer, exchanges)
                for s, stage in enumerate(pipeline.parts)
            )
            for p, pipeline in enumerate(pipelines)
        )
        splits = classes, sequence
        fine = frozenset[FactorClass]() if finer is None else finer.fine
        annotated = AnnotatedGraph(graph, factors, flow, self.plan, self.wants_values, *splits, layouts, stage_of, fine)
        _check_batch(annotated)
        return annotated

    def _with_program(self, analysed: AnalysedGraph) -> AnnotatedGraph:
        """Put a plan on a graph whose one stage says op by op what is cut."""
        graph, factors, flow = analysed.graph, analysed.factors, analysed.flow
        (pipeline,), nothing = self.plan.parts(graph.num_blocks), frozenset[FactorClass]()
        (stage,) = pipeline.parts
        choices = program_choices(analysed, stage)
        classes = frozenset(choice.factor for choice in choices.values() if choice.factor is not None)
        parts, *others = ({c: shares(c, ratios) for c in _in_order(classes)} for ratios in segments(stage))
        axis = StageAxis(len(stage.devices), parts, tuple(others))
        layout = StageLayout(0, 0, stage.devices, ALONE, axis)
        stages = (cut_stages(graph, flow, pipeline.blocks),)
        return AnnotatedGraph(
            graph, factors, flow, self.plan, self.wants_values, classes, nothing, ((layout,),), stages, choices=choices
        )

    @property
    def _is_split(self) -> bool:
        """Tell whether some stage has several devices."""
        return any(len(stage.devices) > 1 for *_, stage in self.plan.stages)

    def _classes(self, graph: Graph, factors: FactorMap, wanted: Splits) -> Splits:
        """Return those of the `wanted` classes that tensor parallel stages split."""
        if self._widest == 1:
            return frozenset()
        optional = _looked_across(graph, factors).difference(classes_to_split(self.plan, factors))
        return frozenset(c for c in wanted if c not in optional or (c.size or 0) >= self._widest)

    def _large_enough(self, classes: Splits, factors: FactorMap) -> Splits:
        """Return the classes without those of fewer parts than groups have devices, unless the plan asks for them."""
        asked = classes_to_split(self.plan, factors)
        return frozenset(c for c in classes if c in asked or (c.size or 0) >= self._widest)

    @property
    def _widest(self) -> int:
        """Return the devices of the largest tensor parallel group."""
        return max(len(tensor) for *_, stage in self.plan.stages for _, tensor in [stage.axes])

    def _sequence(self, graph: Graph, factors: FactorMap, flow: Flow, classes: Splits, wanted: Splits) -> Splits:
        """Return what may be shared as a sequence: what no stage would rather split, or what none splits."""
        context = any(stage.shares_sequence for *_, stage in self.plan.stages)
        if not context and not (self.plan.sequence_parallel and self._is_split):
            return frozenset()
        found = sequence_classes(graph, factors, flow, wanted) or sequence_classes(graph, factors, flow, classes)
        if not found:
            asked = "context" if context else "sequence_parallel"
            raise PlanError(
                f"the plan asks for {asked}, but apart from the rows of the batch this model has no dim that its "
                f"products with parameters carry along\nhint: leave {asked} out"
            )
        return found


def _layout(
    pipeline: int,
    index: int,
    stage: Stage,
    classes: Splits,
    sequence: Splits,
    factors: FactorMap,
    finer: FinerCut | None,
    exchanges: Splits,
) -> StageLayout:
    context, tensor = stage.axes
    fine = ALONE
    if finer is not None and len(tensor) > finer.ways:
        tensor, inner = finer.ratios(stage)
        fine = StageAxis(len(inner), {c: part_sizes(c, inner, factors) for c in _in_order(finer.fine)})
    parts = {factor: part_sizes(factor, tensor, factors) for factor in _in_order(classes)} if len(tensor) > 1 else {}
    pieces = {factor: _pieces(factor, stage, factors) for factor in _in_order(sequence)}
    if stage.shares_sequence and not stage.is_grid and exchanges:
        pieces |= {factor: part_sizes(factor, context, factors) for factor in _in_order(exchanges)}
    if not stage.shares_sequence:  # a tensor parallel group may share the sequence where it splits nothing else
        parts, pieces = {**parts, **pieces}, {}
    axes = StageAxis(len(context), pieces), StageAxis(len(tensor), parts)
    return StageLayout(pipeline, index, stage.devices, *axes, fine)


def _pieces(factor: FactorClass, stage: Stage, factors: FactorMap) -> tuple[int, ...]:
    """Return each device's share of a sequence; one whose fixed length is less than there are parts is refused."""
    context, tensor = stage.axes
    if not stage.shares_sequence:
        return shares(factor, tensor)
    is_short = factor.size is not None and factor.size < len(context)
    return part_sizes(factor, context, factors) if is_short else shares(factor, context)


def _in_order(classes: Splits) -> list[FactorClass]:
    return sorted(classes, key=lambda c: c.id)


def _check_batch(annotated: AnnotatedGraph) -> None:
    if annotated.splits_batch and annotated.graph.batch_symbol is None:
        why = "; ".join(annotated.graph.notes) or "the example batch has no common batch dim"
        raise PlanError(
            f"this model's batch size is fixed in its graph ({why}), so its rows cannot be spread over "
            f"{len(annotated.plan.pipelines)} pipelines or micro-batches\nhint: use one pipeline and one micro-batch"
        )


def classes_to_split(plan: Plan, factors: FactorMap) -> tuple[FactorClass, ...]:
    """Return the classes that the plan's `split` names by dims of parameters."""
    found: dict[FactorClass, None] = {}
    for pattern, dim in plan.split:
        leaves = [leaf for leaf in factors.leaves if leaf.kind is LeafKind.PARAMETER and fnmatch(leaf.name, pattern)]
        dims = [factors.dims(leaf.node)[dim] for leaf in leaves if dim < len(factors.dims(leaf.node))]
        classes = [c for classes in dims for c in classes if _is_eligible(c, factors)]
        if not classes:
            names = [leaf.name for leaf in factors.leaves if leaf.kind is LeafKind.PARAMETER]
            raise PlanError(
                f"the plan wants dim {dim} of {pattern!r} split, but no parameter of that name has such a dim that can "
                f"be\nhint: the parameters are {', '.join(names[:4])}, ..."
            )
        found.update(dict.fromkeys(classes))
    return tuple(found)


def _looked_across(graph: Graph, factors: FactorMap) -> frozenset[FactorClass]:
    """Return the classes that some op has a sharded form for: of a few labels, each device may have them all."""
    ops = (factors.op(node) for node in graph.graph.nodes if factors.is_op(node))
    return frozenset(factor for op in ops for factor in op.sharded)


def finer_than(analysed: AnalysedGraph, classes: Splits, widest: int) -> FinerCut | None:
    """Return how a group of `widest` devices cuts classes that have fewer parts; None where none does, or none can."""
    return _finer_cut(analysed.graph, analysed.factors, classes, _rivals, widest)


def part_sizes(factor: FactorClass, ratios: tuple[int, ...], factors: FactorMap) -> tuple[int, ...]:
    """Return each device's part of `factor`, in proportion to `ratios`, at least one each.

    Raises:
        PlanError: more devices than parts; names the parameters.
    """
    assert factor.size is not None
    if factor.size < len(ratios):
        where = ", ".join(f"dim {dim} of {name}" for name, dim in factors.occurrences(factor)[:4])
        raise PlanError(
            f"cannot split a dimension of {factor.size} parts over {len(ratios)} devices ({where})\nhint: use at most "
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


@dataclass
class _Tally:
    """What splitting a class brings.

    Attributes:
        flops: that are spread.
        communicated: elements that are sent for it.
        splits_weights: some product has it in what comes of parameters alone: they are spread, too. A sequence of fixed
            length is in a parameter that is added, and in activations: products would be given whole weights.
    """

    flops: float = 0.0
    communicated: float = 0.0
    splits_weights: bool = False

    @property
    def score(self) -> float:
        return self.flops / max(self.communicated, 1.0)


def tensor_classes(
    graph: Graph, factors: FactorMap, flow: Flow, wanted: Sequence[FactorClass] = ()
) -> frozenset[FactorClass]:
    """Return the classes to split over a tensor-parallel group; never two that one op could split.

    `wanted` are split whatever they cost, the first of two rivals.
    """
    tallies = _tally(graph, factors, flow)
    eligible = [c for c in tallies if _is_eligible(c, factors)]
    rivals = _rivals(graph, factors)
    spreading = [c for c in eligible if tallies[c].flops > 0 and tallies[c].splits_weights]
    ranked = sorted(spreading, key=lambda c: (-tallies[c].score, c.id))
    chosen: list[FactorClass] = []
    for candidate in (*wanted, *ranked):
        if rivals[candidate].isdisjoint(chosen):
            chosen.append(candidate)
    least = _WORTH * _typical([tallies[c] for c in chosen])
    worth = [c for c in chosen if c in wanted or tallies[c].score >= least]
    tables = [c for c in _vocabularies(graph, factors) if c in eligible and rivals[c].isdisjoint(worth)]
    return frozenset((*worth, *tables))


def _typical(tallies: list[_Tally]) -> float:
    """Return the median score by FLOPs: half of all FLOPs are in classes that have at least this score."""
    half, passed = sum(tally.flops for tally in tallies) / 2, 0.0
    for tally in sorted(tallies, key=lambda t: -t.score):
        passed += tally.flops
        if passed >= half:
            return tally.score
    return 0.0


def _vocabularies(graph: Graph, factors: FactorMap) -> list[FactorClass]:
    """Return the classes of tables that are looked up for every row of the batch and larger than what is read of them.

    A look-up has no FLOPs to spread, but its table is stored, has a gradient and is updated.
    """
    found: set[FactorClass] = set()
    for node in graph.graph.nodes:
        looked_up = factors.op(node).sharded & factors.op(node).reduced if factors.is_op(node) else frozenset()
        for factor in looked_up:
            tables = [leaf.node for leaf, _ in factors.leaf_dims(factor) if leaf.node in node.all_input_nodes]
            if factors.row_dim(node) is not None and any(meta.numel(t) >= meta.numel(node) for t in tables):
                found.add(factor)
    return sorted(found, key=lambda c: c.id)


def _is_eligible(factor: FactorClass, factors: FactorMap) -> bool:
    """Tell whether a class can be split over a tensor-parallel group, and parameters have it."""
    known = factor.size is not None and factor.size > 1 and not factor.is_batch
    return known and factors.splittable(factor) and bool(factors.occurrences(factor))


def _tally(graph: Graph, factors: FactorMap, flow: Flow) -> Mapping[FactorClass, _Tally]:
    tallies: dict[FactorClass, _Tally] = defaultdict(_Tally)
    counted_backward: set[tuple[FactorClass, fx.Node]] = set()
    for node in graph.graph.nodes:
        if factors.is_op(node) and flow.is_mixed(node):
            _tally_op(node, factors, flow, tallies, counted_backward)
    return tallies


def _tally_op(
    node: fx.Node,
    factors: FactorMap,
    flow: Flow,
    tallies: dict[FactorClass, _Tally],
    counted_backward: set[tuple[FactorClass, fx.Node]],
) -> None:
    op = factors.op(node)
    flops = product_flops(node, op) if meta.is_tensor(node) else 0.0
    for factor in op.classes:
        tally = tallies[factor]
        if factor in op.whole:
            having = [o.node for o in op.operands if factor in o.classes]
            tally.communicated += sum(map(meta.numel, having))
            continue
        tally.flops += flops
        weights = (o for o in op.operands if not flow.through_inputs(o.node))
        tally.splits_weights |= flops > 0 and any(factor in weight.classes for weight in weights)
        if factor in op.sharded and factor.size:
            split = [o.node for o in op.operands if factor in o.classes and flow.is_mixed(o.node)]
            tally.communicated += sum(_PER_ROW * meta.numel(value) / factor.size for value in split)
        if factor in op.reduced and meta.is_tensor(node):
            tally.communicated += meta.numel(node)
        for operand in op.operands:
            lacks = factor not in operand.classes
            edge = (factor, operand.node)
            if lacks and flow.is_mixed(operand.node) and edge not in counted_backward:
                counted_backward.add(edge)
                tally.communicated += meta.numel(operand.node)


def _rivals(graph: Graph, factors: FactorMap) -> Mapping[FactorClass, set[FactorClass]]:
    """Return for each class those that stand in one op with it, where either could be split but not both."""
    rivals: dict[FactorClass, set[FactorClass]] = defaultdict(set)
    for node in graph.graph.nodes:
        if not factors.is_op(node):
            continue
        present = factors.op(node).classes - factors.op(node).whole
        for factor in present:
            rivals[factor] |= present - {factor}
    return rivals
