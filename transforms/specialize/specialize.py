"""Turn a deduced graph into the graph of one device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import fx

from hetu_fx.annotations.annotation import Split
from hetu_fx.comm_ops.ops.product_from_factors import PRODUCT_FROM_FACTORS, PRODUCTS
from hetu_fx.comm_ops.ops.table import FUSED_OPS
from hetu_fx.deduction.factors.factors import FactorClass, OpFactors
from hetu_fx.deduction.rules.forms import PartCall
from hetu_fx.errors import DeductionError
from hetu_fx.graph import meta
from hetu_fx.graph.calls import Size, argument, bound, callee, operand, overload
from hetu_fx.graph.graph import Leaf
from hetu_fx.graph.leaves.leaf_ops import LEAF
from hetu_fx.transforms.layouts.annotated_graph import TENSOR, StageLayout, is_size, stage_nodes
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.states import WHOLE, OperandNeed, SplitOn, States, Summed
from hetu_fx.transforms.rewrites.random_ops import random_cut
from hetu_fx.transforms.specialize.casts import DTYPES, cast_target, check_casts, is_castable
from hetu_fx.transforms.specialize.device_graph import (
    DeviceGraph,
    GraphResult,
    GraphSlot,
    Handover,
    ResultKind,
    SlotKind,
    Value,
)
from hetu_fx.transforms.specialize.local_sizes import LocalSizes, localized_call, product
from hetu_fx.transforms.specialize.reshard import Reshards

aten = torch.ops.aten


@dataclass(frozen=True)
class Specialize:
    """Make the graph of one rank, or of one of the chunks of its stage; None where the plan gives it no such.

    Requires: a deduced graph.
    Ensures: the device's graph holds only its stage's ops, with local sizes, and a hetu:: node wherever a value's state
        differs from what its reader needs; sums over the stage's devices are made where the summands appear. In a stage
        with a dtype, what torch.autocast would cast is cast, and what leaves the stage has the model's dtype.

        %linear = linear(%x, %w)            %linear = linear(%x, %w_part)
        %add = add(%residual, %linear)  ->  %all_reduce = hetu.all_reduce(%linear, [0, 1], 'duplicate')
                                            %add = add(%residual, %all_reduce)
    """

    rank: int
    chunk: int = 0
    name: ClassVar[str] = "specialize"

    def __call__(self, deduced: DeducedGraph) -> DeviceGraph | None:
        layouts = deduced.annotated.layouts_of(self.rank)
        check_casts(deduced.annotated, talks=deduced.talks_across_replicas)
        return _Builder(deduced, layouts[self.chunk], self.rank).build() if self.chunk < len(layouts) else None


class _Builder:
    """Builds one device graph, node by node."""

    def __init__(self, deduced: DeducedGraph, layout: StageLayout, rank: int) -> None:
        self.deduced, self.layout, self.rank = deduced, layout, rank
        self.annotated = deduced.annotated
        self.inside, self.batch = deduced.inside(layout), deduced.batch
        self.peers, self.places = layout.peers(rank), layout.coordinates(rank)
        self.graph = fx.Graph()
        self.slots: list[GraphSlot] = []
        self.values: dict[fx.Node, fx.Node] = {}
        self.edges: dict[tuple[Hashable, ...], fx.Node] = {}
        self.low = DTYPES.get(deduced.annotated.stage(layout).dtype or "")
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.differentiable: set[fx.Node] = set()
        states = tuple(deduction.states for deduction in self.inside)
        self.sizes = LocalSizes(self.annotated.factors, layout, self.places, states, self.values, self._emit)
        self.reshards = Reshards(deduced, layout, rank, self.sizes, self._emit, self.differentiable)

    def build(self) -> DeviceGraph:
        stage = stage_nodes(self.annotated, self.layout)
        graph = self.annotated.graph
        for node in graph.graph.nodes:
            if node in stage.received:
                self.values[node] = self._placeholder(node, GraphSlot(SlotKind.RECEIVED, node.name))
            elif node in stage.needed and node.op == "placeholder":
                self.values[node] = self._leaf(node, graph.leaf_of(node))
        for node in graph.graph.nodes:
            if node in stage.needed and node.op == "call_function":
                self.values[node] = self._op(node)
        outputs = [(graph.outputs[i], graph.output_values[i]) for i in stage.outputs]
        results = [(ResultKind(leaf.kind.value), leaf.name, node) for leaf, node in outputs]
        results += [(ResultKind.SENT, node.name, node) for node in stage.sent]
        self.graph.output(tuple(self._output(kind, node) for kind, _, node in results))
        return DeviceGraph(
            rank=self.rank,
            layout=self.layout,
            num_stages=len(self.annotated.stages[self.layout.pipeline]),
            graph=self.graph,
            slots=tuple(self.slots),
            results=tuple(GraphResult(kind, name) for kind, name, _ in results),
            handovers_in=tuple(self._handover(node, self._source(node), self.layout) for node in stage.received),
            handovers_out=tuple(
                self._handover(node, self.layout, target) for node in stage.sent for target in self._targets(node)
            ),
            differentiable=frozenset(self.differentiable),
        )

    def _leaf(self, node: fx.Node, leaf: Leaf) -> fx.Node:
        return self._placeholder(node, GraphSlot(SlotKind(leaf.kind.value), leaf.name))

    def _placeholder(self, node: fx.Node, slot: GraphSlot) -> fx.Node:
        self.slots.append(slot)
        return self._traced(node, self.graph.placeholder(node.name))

    def _traced(self, source: fx.Node, target: fx.Node) -> fx.Node:
        meta.copy_meta(source, target)
        meta.keep_num_dims(source, target)
        return target

    def _op(self, node: fx.Node) -> fx.Node:
        """Copy one op with local operands and sizes, and sum its result where it comes out as summands."""
        if node not in self.inside[0].decisions:
            if (length := self._length(node)) is not None:
                return length
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
            return self._in_output_states(node, self._emit(node, callee(node), *args, **kwargs))
        cut = [factor for factor in self._cut(node) if factor is not None]
        op = reduce(OpFactors.with_cut, cut, self.annotated.factors.op(node))
        sizes = self.sizes.in_op(cut, self._segment(node))
        args, kwargs = localized_call(node, op, self._operands(node), self.values, cut, sizes)
        if op.traits.counter_at is not None:
            args = self._with_rows(
                node, self._with_cuts(node, args, op.traits.counter_at, cut), op.traits.counter_at - 1
            )
        if op.traits.needs_entries and any(sizes(factor) == 0 for factor in cut):
            return self._in_output_states(node, self._of_no_entries(node, cut, args, kwargs))
        made = self._from_factors(node, args) or self._in_form(node, args, kwargs)
        result = made or self._emit(node, callee(node), *args, **kwargs)
        return self._in_output_states(node, result)

    def _of_no_entries(
        self, node: fx.Node, cut: Sequence[FactorClass], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        """Do an op on zeros, an entry in each dim that is cut, and drop what it makes of them."""
        dims = [d for d, classes in enumerate(self.annotated.factors.dims(node)) if not set(cut).isdisjoint(classes)]
        pads = [pad for d in reversed(range(len(meta.shape(node)))) for pad in (0, int(d in dims))]
        x = self._emit(node, aten.constant_pad_nd.default, args[0], pads)
        made = self._emit(node, callee(node), x, *args[1:], **kwargs)
        for dim in dims:
            made = self._emit(node, aten.slice.Tensor, made, dim, 0, -1)
        return made

    def _cut(self, node: fx.Node) -> tuple[FactorClass | None, ...]:
        """Return the factors that an op computes a part of, by axis."""
        return tuple(deduction.decisions[node].factor for deduction in self.inside)

    def _segment(self, node: fx.Node) -> int:
        """Return the segment of a program whose ratios an op's parts follow."""
        return max(deduction.decisions[node].segment for deduction in self.inside)

    def _in_form(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
        """Write an op in the form that it has for parts of what is cut in it, by axis; None for one that has none."""
        op = self.annotated.factors.op(node)
        for axis, factor in enumerate(self._cut(node)):
            if factor is None:
                continue
            form = _form(op, factor, travels=self.inside[axis].decisions[node].travels)
            if form is not None:
                return form(self._part_call(node, args, kwargs, axis, factor))
            if factor in op.averaged:
                return self._weighed(node, self._emit(node, callee(node), *args, **kwargs), axis, factor)
        return None

    def _from_factors(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node | None:
        """Write a product whose weight's gradient is made from gathered factors; None for any other op."""
        decision = self.inside[TENSOR].decisions[node]
        if not decision.factors or decision.factor is None:
            return None
        made_of = PRODUCTS[overload(node)]
        x, weight = args[made_of.x], args[made_of.weight]
        bias = args[made_of.bias] if made_of.bias is not None and made_of.bias < len(args) else None
        given = x, weight, bias, str(node.target), self.peers[TENSOR], *self._cut_of_rows(node, decision.factor)
        made = self._emit(node, PRODUCT_FROM_FACTORS.overload, *given)
        self.differentiable.add(made)
        return made

    def _cut_of_rows(self, node: fx.Node, factor: FactorClass) -> tuple[int, tuple[Size, ...], Size, Size]:
        """Return (dim, sizes, outer, inner) of the parts of an op's result."""
        dims = self.annotated.factors.dims(node)
        dim = next(i for i, classes in enumerate(dims) if factor in classes)
        parts = self.sizes.parts(factor, self._segment(node))
        return dim, parts.sizes, *self.sizes.around(factor, dims[dim])

    def _part_call(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int, factor: FactorClass
    ) -> PartCall:
        """Return what a form of an op is told where a factor is cut along an axis."""
        travels = self.inside[axis].decisions[node].travels
        classes = self.annotated.factors.op(node).travelling if travels else {}
        travelling = {position: self.sizes.parts(cls).sizes for position, cls in classes.items()}
        place, own = self.places[axis], self.sizes.parts(factor, self._segment(node))
        return PartCall(
            node,
            given=bound(overload(node), args, kwargs),
            devices=self.peers[axis],
            position=place,
            sizes=own.sizes,
            start=own.starts[place],
            travelling=travelling,
            emit=partial(self._emit, node),
            communicate=partial(self.reshards.resolved, node),
            fused=partial(self._fused, node),
        )

    def _length(self, node: fx.Node) -> fx.Node | None:
        """Return the whole length for a size that is read of a dim in parts; None for any other node."""
        source = operand(node) if is_size(node) else node
        states = [deduction.states.get(source) for deduction in self.inside]
        cut = [state.factor for state in states if isinstance(state, SplitOn)]
        if source is node or not cut:
            return None
        classes = self.annotated.factors.dims(source)[argument(node, "dim")]
        if not any(factor in classes for factor in cut):
            return None
        length = product([self.sizes.whole(cls) for cls in classes])
        return self._emit(node, int, length) if isinstance(length, int) else length

    def _with_cuts(self, node: fx.Node, args: tuple[Any, ...], at: int, cut: Sequence[FactorClass]) -> tuple[Any, ...]:
        """Tell an op that draws which part of the whole tensor it draws for."""
        drawn = sorted((self._drawn(node, factor) for factor in cut), key=lambda pair: pair[0])
        return (*args[:at], [number for _, one in drawn for number in one], *args[at + 1 :])

    def _with_rows(self, node: fx.Node, args: tuple[Any, ...], at: int) -> tuple[Any, ...]:
        """Tell an op that draws where rows stand in the dim that has them, and whether the device has all of them."""
        if not args[at]:
            return args
        dim, length, *_ = args[at]
        classes = self.annotated.factors.dims(node)[dim]
        rows = next((cls for cls in classes if cls.is_batch), None)
        inner = length if rows is None else self.sizes.around(rows, classes)[1]
        own = int(self.batch.decisions[node].factor is not None)
        return (*args[:at], [dim, length, inner, own], *args[at + 1 :])

    def _drawn(self, node: fx.Node, factor: FactorClass) -> tuple[int, list[Size]]:
        """Return how much stands inside of a class that is cut, and the cut."""
        axis = self.layout.axes[self.sizes.axis(factor)]
        cut = factor, self._segment(node)
        split = self.deduced.axis(node, SplitOn(*cut), axis)
        assert isinstance(split, Split)
        start, part, whole = self.sizes.start(*cut), self.sizes.part(*cut), self.sizes.parts(*cut).length
        return split.inner, random_cut(split.dim, start, part, whole, split.inner)

    def _weighed(self, node: fx.Node, mean: fx.Node, axis: int, factor: FactorClass) -> fx.Node:
        """Turn the mean over this device's part into its summand of the mean over all parts."""
        parts = self.layout.axes[axis].parts(factor, self._segment(node))
        share = parts[self.places[axis]] / sum(parts)
        return self._emit(node, aten.mul.Tensor, mean, share)

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        columns = zip(*(deduction.needs(node) for deduction in (*self.inside, self.batch)), strict=True)
        operands = [self._edge(needs, self._alike(node, i)) for i, needs in enumerate(columns)]
        if self.low is None:
            return operands
        sources = [need.node for need in self.inside[0].needs(node)]
        if node.target is LEAF:  # it is called in the dtypes that it was captured with
            return [self._cast(*pair, meta.dtype(pair[0])) for pair in zip(sources, operands, strict=True)]
        target = cast_target(node, self.low)
        if target is None:
            return operands
        return [self._cast(*pair, target) for pair in zip(sources, operands, strict=True)]

    def _cast(self, source: fx.Node, value: fx.Node, target: torch.dtype) -> fx.Node:
        """Return a local value in another dtype, cast once; `source` is what it is of."""
        if not is_castable(meta.value(source)):
            return value
        if (value, target) not in self.casts:
            self.casts[value, target] = self._emit(source, aten.to.dtype, value, target)
        return self.casts[value, target]

    @property
    def _replicas(self) -> tuple[StageLayout, ...]:
        return tuple(stages[0] for stages in self.annotated.stages)

    def _in_output_states(self, node: fx.Node, result: fx.Node) -> fx.Node:
        """Bring a result into the states that its readers share: summands are summed, what lies in parts joined."""
        made = [state for deduction in self.inside if (state := deduction.made.get(node)) is not None]
        if len(made) < len(self.inside) or not meta.is_tensor(node):
            return result
        return self.reshards.inside(node, result, tuple(made), self._states(node))

    def _states(self, node: fx.Node) -> States:
        return self.deduced.states(node, self.layout)

    def _alike(self, node: fx.Node, position: int) -> tuple[tuple[OperandNeed, ...], ...]:
        """Return what the replicas' ops need of this operand inside their stages; each by its own deductions."""
        deductions = map(self.deduced.inside, self._replicas)
        return tuple(tuple(deduction.needs(node)[position] for deduction in inside) for inside in deductions)

    def _edge(self, needs: Sequence[OperandNeed], replicas: Sequence[Sequence[OperandNeed]]) -> fx.Node:
        """Return the value as its reader needs it on all axes, inserting communication at most once per kind.

        Replicas exchange it as their readers take it, or as it lies in each where some of these take summands or give
        back summands: the cotangent is summed inside a stage before it is over replicas.
        """
        *inside, batch = needs
        if any(map(_is_of_summands, chain.from_iterable(replicas))):
            return self._once("read", needs, lambda: self._in_stage(inside, self._over_replicas(batch)))
        value = self._once("in stage", needs, lambda: self._in_stage(inside, self.values[batch.node]))
        # Readers that are alike in one replica may not be in another: all exchange it as often as any of them must.
        states = [tuple(need.state for need in of_replica) for of_replica in replicas]
        return self._once("read", (*needs, *states), lambda: self.reshards.over_replicas(batch, states, value))

    def _over_replicas(self, need: OperandNeed) -> fx.Node:
        """Return the value as its reader needs it on the batch axis, as it lies inside the stage."""
        states = [self.deduced.states(need.node, layout) for layout in self._replicas]
        value = self.values[need.node]
        return self._once("exchanged", (need,), lambda: self.reshards.over_replicas(need, states, value))

    def _once(self, what: str, given: Sequence[Hashable], make: Callable[[], fx.Node]) -> fx.Node:
        """Return what is made of what is given, the same node each time."""
        key = (what, *given)
        if key not in self.edges:
            self.edges[key] = make()
        return self.edges[key]

    def _in_stage(self, needs: Sequence[OperandNeed], value: fx.Node) -> fx.Node:
        """Return the value as its reader needs it on the axes inside the stage."""
        node = needs[0].node
        unsummed = [node not in deduction.summed_cotangents for deduction in self.inside]
        summed = [need.summed_cotangent and here for need, here in zip(needs, unsummed, strict=True)]
        wanted = tuple(need.state for need in needs)
        value = self.reshards.inside(node, value, self._states(node), wanted, summed)
        if any(need.first_only and place > 0 for need, place in zip(needs, self.places, strict=True)):
            # A gradient of zeros comes when the first device's does, so that all begin its message at the same place.
            value = self._emit(node, aten.fill.Scalar, value, 0)
        return value

    def _emit(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call that belongs to a node of the logical graph."""
        return self._traced(node, self.graph.call_function(target, args, kwargs))

    def _fused(self, node: fx.Node, name: str, *args: Any) -> fx.Node:
        """Add a call of an op that computes while it communicates, and return its first result."""
        call = self._emit(node, FUSED_OPS[name].overload, *args)
        if node in self.annotated.flow.differentiable:
            self.differentiable.add(call)
        return self._emit(node, operator.getitem, call, 0)

    def _output(self, kind: ResultKind, node: fx.Node) -> fx.Node:
        """Return the local value of an output; other sums over the batch than those in buffers are made later."""
        state = self.batch.states.get(node, WHOLE)
        if kind is not ResultKind.BUFFER_UPDATE or not isinstance(state, Summed):
            return self._as_the_model_has_it(node, self.values[node])
        return self._as_the_model_has_it(node, self._over_replicas(OperandNeed(node, WHOLE)))

    def _as_the_model_has_it(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """Return what leaves the stage in the dtype that it has without a dtype of the stage."""
        is_low = self.low is not None and is_castable(meta.value(node))
        return self._cast(node, value, meta.dtype(node)) if is_low else value

    def _source(self, node: fx.Node) -> StageLayout:
        pipeline = self.layout.pipeline
        return self.annotated.stages[pipeline][self.annotated.stage_of[pipeline][node]]

    def _targets(self, node: fx.Node) -> tuple[StageLayout, ...]:
        later = self.annotated.stages[self.layout.pipeline][self.layout.index + 1 :]
        return tuple(layout for layout in later if node in stage_nodes(self.annotated, layout).received)

    def _handover(self, node: fx.Node, source: StageLayout, target: StageLayout) -> Handover:
        _check_sendable(node)
        value = Value(
            node.name,
            tuple(meta.expression(size) for size in meta.shape(node)),
            meta.dtype(node),
            node in self.annotated.flow.differentiable,
            self.deduced.value_annotation(node, source),
        )
        return Handover(value, source.key, target.key, self.deduced.value_annotation(node, target))


def _is_of_summands(need: OperandNeed) -> bool:
    """Tell whether an op takes summands of a value, or gives back summands of its cotangent."""
    return need.summed_cotangent or isinstance(need.state, Summed)


def _form(op: OpFactors, factor: FactorClass, *, travels: bool) -> Callable[[PartCall], fx.Node] | None:
    """Return the form that an op has for parts of a factor that is cut in it, if it needs one."""
    if op.traits.ring and travels:
        return op.traits.ring
    if op.traits.sharded and factor in op.sharded:
        return op.traits.sharded.write
    return op.traits.placed if factor in op.with_cut(factor).placed else None


def _check_sendable(node: fx.Node) -> None:
    if not meta.is_tensor(node):
        raise DeductionError(
            f"a size computed from activations ('{node.name}', {meta.source_line(node)}) is read by another stage"
            f"\nhint: use a plan whose pipelines have one stage"
        )
