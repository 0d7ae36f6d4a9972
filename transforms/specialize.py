"""Turn a deduced graph into the graph of one device.

Requires: a deduced graph.
Ensures: the device's graph holds only its stage's ops, with local sizes, and a hetu:: node wherever a value's state
differs from what its reader needs; sums over the stage's devices are made where the summands appear.

    %linear = aten.linear(%x, %w)                 %linear = aten.linear(%x, %w_part)
    %add = aten.add(%residual, %linear)     ->    %all_reduce = hetu.all_reduce(%linear, [0, 1], 'duplicate')
                                                  %add = aten.add(%residual, %all_reduce)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from hetu_fx.annotations.annotation import Split, cotangent
from hetu_fx.comm_ops import COMM_OPS, FUSED_OPS
from hetu_fx.comm_ops.resolution import Resolution, resized
from hetu_fx.comm_ops.resolve import resolve_edge
from hetu_fx.deduction.factors import FactorClass
from hetu_fx.errors import DeductionError
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, callee, operand, overload
from hetu_fx.graph.graph import Leaf
from hetu_fx.transforms.deduced import DeducedGraph
from hetu_fx.transforms.device_graph import DeviceGraph, Handover, Result, ResultKind, Slot, SlotKind, Value
from hetu_fx.transforms.local_sizes import LocalSizes
from hetu_fx.transforms.localize import localized_call, product
from hetu_fx.transforms.outside import is_size
from hetu_fx.transforms.parts import Parts
from hetu_fx.transforms.placed_forms import Placed, placed_form
from hetu_fx.transforms.random_ops import CUT_AT, cut_of
from hetu_fx.transforms.ring_forms import Circle, ring_form
from hetu_fx.transforms.shard import Shard
from hetu_fx.transforms.sharded_forms import form_of
from hetu_fx.transforms.stages import StageLayout, stage_nodes
from hetu_fx.transforms.states import SUMMED, WHOLE, AxisState, Need, SplitOn, Summed

States = tuple[AxisState, ...]


@dataclass(frozen=True)
class Specialize:
    """Make the graph of one rank, or None if the plan leaves the rank out."""

    rank: int
    name: str = "specialize"

    def __call__(self, deduced: DeducedGraph) -> DeviceGraph | None:
        layout = next((at for at in deduced.annotated.layouts if self.rank in at.devices), None)
        return None if layout is None else _Builder(deduced, layout, self.rank).build()


@dataclass(frozen=True)
class _Edge:
    """A value as one kind of reader needs it; readers with equal edges share the nodes."""

    node: fx.Node
    tensor: AxisState
    tensor_summed: bool
    batch: AxisState
    batch_summed: bool
    first_only: bool


class _Builder:
    """Builds one device graph, node by node."""

    def __init__(self, deduced: DeducedGraph, layout: StageLayout, rank: int) -> None:
        self.deduced, self.layout, self.rank = deduced, layout, rank
        self.annotated = deduced.annotated
        self.tensor, self.batch = deduced.tensor(layout), deduced.batch
        self.coordinate = layout.devices.index(rank)
        self.graph = fx.Graph()
        self.slots: list[Slot] = []
        self.values: dict[fx.Node, fx.Node] = {}
        self.edges: dict[_Edge, fx.Node] = {}
        self.differentiable: set[fx.Node] = set()
        states, factors = self.tensor.states, self.annotated.factors
        self.sizes = LocalSizes(factors, layout, self.coordinate, states, self.values, self._emit)

    def build(self) -> DeviceGraph:
        stage = stage_nodes(self.annotated, self.layout)
        graph = self.annotated.graph
        for node in graph.graph.nodes:
            if node in stage.received:
                self.values[node] = self._placeholder(node, Slot(SlotKind.RECEIVED, node.name))
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
            results=tuple(Result(kind, name) for kind, name, _ in results),
            handovers_in=tuple(self._handover(node, self._source(node), self.layout) for node in stage.received),
            handovers_out=tuple(
                self._handover(node, self.layout, target) for node in stage.sent for target in self._targets(node)
            ),
            differentiable=frozenset(self.differentiable),
        )

    def _leaf(self, node: fx.Node, leaf: Leaf) -> fx.Node:
        return self._placeholder(node, Slot(SlotKind(leaf.kind.value), leaf.name))

    def _placeholder(self, node: fx.Node, slot: Slot) -> fx.Node:
        self.slots.append(slot)
        return self._traced(node, self.graph.placeholder(node.name))

    def _traced(self, source: fx.Node, target: fx.Node) -> fx.Node:
        meta.copy_meta(source, target)
        return target

    def _op(self, node: fx.Node) -> fx.Node:
        """Copy one op with local operands and sizes, and sum its result where it comes out as summands."""
        factors = self.annotated.factors
        if node in self.tensor.decisions:
            factor = self.tensor.decisions[node].factor
            op = factors.op(node) if factor is None else factors.op(node).cut_at(factor)
            args, kwargs = localized_call(node, op, self._operands(node), self.values, factor, self.sizes.in_op(factor))
            if factor is not None and node.target in CUT_AT:
                args = self._with_cut(node, args, factor)
        elif (length := self._length(node)) is not None:
            return length
        else:
            factor = None
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
        if factor is not None and self.tensor.decisions[node].travels:
            return self._settled(node, ring_form(node)(self._circle(node, args, kwargs, factor)))
        if factor is not None and factor in factors.op(node).sharded:
            return self._settled(node, form_of(node).write(self._shard(node, args, kwargs, factor)))
        if factor is not None and factor in factors.op(node).cut_at(factor).placed:
            return self._settled(node, placed_form(node)(self._place(node, args, kwargs, factor)))
        result = self._emit(node, callee(node), *args, **kwargs)
        if factor is not None and factor in factors.op(node).averaged:
            result = self._weighed(node, result, factor)
        return self._settled(node, result)

    def _length(self, node: fx.Node) -> fx.Node | None:
        """Return the whole length for a size that is read of a dim in parts; None for any other node."""
        source = operand(node) if is_size(node) else node
        state = self.tensor.states.get(source)
        if source is node or not isinstance(state, SplitOn):
            return None
        classes = self.annotated.factors.dims(source)[argument(node, "dim")]
        if state.factor not in classes:
            return None
        length = product([self.sizes.whole(cls) for cls in classes])
        return self._emit(node, int, length) if isinstance(length, int) else length

    def _shard(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], factor: FactorClass) -> Shard:
        sizes, devices = self.layout.sizes[factor], self.layout.devices
        emit, communicate = (partial(write, node) for write in (self._emit, self._resolved))
        return Shard(node, args, kwargs, devices, self.coordinate, sizes, emit, communicate)

    def _with_cut(self, node: fx.Node, args: tuple[Any, ...], factor: FactorClass) -> tuple[Any, ...]:
        """Tell an op that draws which part of the whole tensor it draws for."""
        split = self.deduced.axis(node, SplitOn(factor), self.layout)
        assert isinstance(split, Split)
        start, part, whole = self.sizes.start(factor), self.sizes.part(factor), self.sizes.parts(factor).length
        cut, at = cut_of(split.dim, start, part, whole, split.inner), CUT_AT[overload(node)]
        return (*args[:at], cut, *args[at + 1 :])

    def _weighed(self, node: fx.Node, mean: fx.Node, factor: FactorClass) -> fx.Node:
        """Turn the mean over this device's part into its summand of the mean over all parts."""
        sizes = self.layout.sizes[factor]
        share = sizes[self.coordinate] / sum(sizes)
        return self._emit(node, torch.ops.aten.mul.Tensor, mean, share)

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        pairs = zip(self.tensor.needs(node), self.batch.needs(node), strict=True)
        return [self._edge(tensor, batch, self._alike(node, i)) for i, (tensor, batch) in enumerate(pairs)]

    def _alike(self, node: fx.Node, position: int) -> States:
        """Return the states in which the replicas' ops take this operand; each by its own deduction."""
        return tuple(self.deduced.tensor(at).needs(node)[position].state for at in self._replicas)

    @property
    def _replicas(self) -> tuple[StageLayout, ...]:
        return tuple(stages[0] for stages in self.annotated.stages)

    def _place(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], factor: FactorClass) -> Placed:
        start, size = self.sizes.start(factor), self.sizes.part(factor)
        return Placed(node, args, kwargs, self.coordinate == 0, start, size, partial(self._emit, node))

    def _circle(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], factor: FactorClass) -> Circle:
        travelling = self.annotated.factors.op(node).travelling
        parts = {position: self.sizes.parts(cls).sizes for position, cls in travelling.items()}
        own = self.sizes.parts(factor).sizes
        return Circle(node, args, kwargs, self.layout.devices, own, parts, partial(self._fused, node))

    def _settled(self, node: fx.Node, result: fx.Node) -> fx.Node:
        """Bring a result into the state that its readers share: summands are summed, what lies in parts joined."""
        made = self.tensor.made.get(node)
        if made is None or made == self.tensor.states[node] or not meta.is_tensor(node):
            return result
        return self._moved(node, result, made, self.tensor.states[node], False)

    def _edge(self, tensor: Need, batch: Need, replicas: States) -> fx.Node:
        """Return the value as its reader needs it on both axes, inserting communication at most once per kind."""
        key = _Edge(
            tensor.node,
            tensor.state,
            tensor.summed_cotangent,
            batch.state,
            batch.summed_cotangent,
            tensor.first_only,
        )
        if key not in self.edges:
            self.edges[key] = self._on_batch(batch, replicas, self._on_tensor(tensor))
        return self.edges[key]

    def _on_tensor(self, need: Need) -> fx.Node:
        node, value = need.node, self.values[need.node]
        if len(self.layout.devices) == 1:
            return value
        state = self.tensor.states[node]
        summed = need.summed_cotangent and node not in self.tensor.summed_cotangents
        if state != need.state or summed:
            value = self._moved(node, value, state, need.state, summed)
        if need.first_only and self.coordinate > 0:
            value = self.graph.call_function(torch.ops.aten.zeros_like.default, (value,))
        return value

    def _moved(self, node: fx.Node, value: fx.Node, state: AxisState, wanted: AxisState, summed: bool) -> fx.Node:
        """Bring a value from one state into another; with `summed`, its cotangent comes back as summands."""
        ends = [end.factor for end in (state, wanted) if isinstance(end, SplitOn)]
        if len(ends) > 1 and not self.annotated.sequence.isdisjoint(ends):
            whole = self._moved(node, value, state, WHOLE, False)
            return self._moved(node, whole, WHOLE, wanted, False)
        if ends and ends[0].size is None:
            return self._moved_in_shares(node, value, (state, wanted), ends[0], summed)
        opening, shape = self.deduced.opening(node, (state, wanted)), self._shape(node)
        source = self.deduced.annotation(node, state, self.layout, opening)
        target = self.deduced.annotation(node, wanted, self.layout, opening)
        back = self.deduced.annotation(node, SUMMED, self.layout) if summed else cotangent(target)
        if opening is None:
            return self._resolved(node, value, resolve_edge(source, target, back, shape))
        factor, size = opening.factor, opening.factor.size
        part = self.sizes.part(factor) if state == SplitOn(factor) else size
        assert isinstance(part, int), "a factor that shares its dim has a fixed size"
        opened = self._emit(node, *opening.opened(value, part))
        moved = self._resolved(node, opened, resolve_edge(source, target, back, opening.shape(shape)))
        return self._emit(node, *opening.closed(moved))

    def _moved_in_shares(
        self, node: fx.Node, value: fx.Node, ends: tuple[AxisState, AxisState], factor: FactorClass, summed: bool
    ) -> fx.Node:
        """Cut or join a dim whose length only the run tells: as one of as many entries as there are shares."""
        dim = next(i for i, classes in enumerate(self.annotated.factors.dims(node)) if factor in classes)
        shape = list(self._shape(node))
        shape[dim] = sum(self.layout.sizes[factor])
        source, target = (self.deduced.annotation(node, end, self.layout) for end in ends)
        back = self.deduced.annotation(node, SUMMED, self.layout) if summed else cotangent(target)
        return self._resolved(node, value, resolve_edge(source, target, back, shape), self.sizes.parts(factor))

    def _emit(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call that belongs to a node of the logical graph."""
        return self._traced(node, self.graph.call_function(target, args, kwargs))

    def _fused(self, node: fx.Node, name: str, *args: Any) -> fx.Node:
        """Add a call of an op that computes while it communicates, and return its first result."""
        call = self._emit(node, FUSED_OPS[name].overload, *args)
        if node in self.annotated.flow.differentiable:
            self.differentiable.add(call)
        return self._emit(node, operator.getitem, call, 0)

    def _on_batch(self, need: Need, states: States, value: fx.Node) -> fx.Node:
        """Sum over replicas what this op needs the sum of, or what its cotangent must be summed of."""
        node = need.node
        state = self.batch.states[node]
        summed = need.summed_cotangent and node not in self.batch.summed_cotangents
        if len(states) == 1 or (state == need.state and not summed):
            return value
        summands = self.deduced.across_states(node, states, self._replicas, "partial")
        target = self.deduced.across_states(node, states, self._replicas, "duplicate")
        source, partial = (summands if state == SUMMED else target), (summands if summed else target)
        return self._resolved(node, value, resolve_edge(source, target, partial, self._shape(node)))

    def _resolved(self, node: fx.Node, value: fx.Node, resolution: Resolution, parts: Parts | None = None) -> fx.Node:
        """Add the calls of a resolution; with `parts`, in those instead of what stands in for them."""
        for made in resolution.calls(self.rank):
            call = resized(made, parts.sizes) if parts else made
            value = self._emit(node, COMM_OPS[call.op].overload, value, *call.args)
            if node in self.annotated.flow.differentiable:
                self.differentiable.add(value)
        return value

    def _shape(self, node: fx.Node) -> tuple[int | None, ...]:
        return self.deduced.shape(node)

    def _output(self, kind: ResultKind, node: fx.Node) -> fx.Node:
        """Return the local value of an output; other sums over the batch than those in buffers are made later."""
        state = self.batch.states.get(node, WHOLE)
        if kind is not ResultKind.BUFFER_UPDATE or not isinstance(state, Summed):
            return self.values[node]
        states = tuple(self.deduced.tensor(at).states[node] for at in self._replicas)
        return self._edge(Need(node, self.tensor.states[node]), Need(node, WHOLE), states)

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


def _check_sendable(node: fx.Node) -> None:
    if not meta.is_tensor(node):
        raise DeductionError(
            f"a size computed from activations ('{node.name}', {meta.source_line(node)}) is read by another stage; use "
            f"a plan whose pipelines have one stage"
        )
