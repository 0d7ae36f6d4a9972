"""How the values of one device's graph come from one state into another: along the axes of its stage, over replicas.

A stage's axes are independent: along one, the devices that differ in their place on it alone change the state, each of
them with what it has by its place on the other. What makes a value smaller is done first, what makes it larger last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from hetu_fx.annotations.annotation import Annotation, Shape, Split, State, cotangent
from hetu_fx.comm_ops.ops.table import COMM_OPS
from hetu_fx.comm_ops.resolve.resolution import OpCall, Resolution, resize_call
from hetu_fx.comm_ops.resolve.resolve import resolve
from hetu_fx.deduction.factors.factors import FactorClass
from hetu_fx.graph.calls import Size
from hetu_fx.transforms.layouts.annotated_graph import StageLayout
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.shardings import DimView, cut_twice
from hetu_fx.transforms.layouts.states import SUMMED, WHOLE, AxisState, OperandNeed, SplitOn, States
from hetu_fx.transforms.specialize.local_sizes import DimParts, LocalSizes

aten = torch.ops.aten


@dataclass(eq=False)
class Reshards:
    """Writes communication into the graph of one device.

    Attributes:
        deduced: what is to be made of the logical graph.
        layout, rank: the device's stage, and the device.
        sizes: its part of every class.
        emit: adds a call that belongs to a node of the logical graph.
        differentiable: the calls so far through which a gradient comes back.
    """

    deduced: DeducedGraph
    layout: StageLayout
    rank: int
    sizes: LocalSizes
    emit: Callable[..., fx.Node]
    differentiable: set[fx.Node]

    def inside(
        self,
        node: fx.Node,
        value: fx.Node,
        states: States,
        wanted: States,
        summed: Sequence[bool] = (False, False, False),
    ) -> fx.Node:
        """Bring a value from its states inside the stage into others; along axes with `summed`, its cotangent comes
        back as summands.

        Raises:
            DeductionError: an annotation cannot say how the value would lie.
        """
        now = list(states)
        inner_first = reversed(range(len(self.layout.axes)))
        for axis in sorted(inner_first, key=lambda axis: _growth(states[axis], wanted[axis])):
            if self.layout.axes[axis].ways > 1 and (states[axis] != wanted[axis] or summed[axis]):
                reshard = _AxisReshard(self, node, axis, [state for i, state in enumerate(now) if i != axis])
                value = reshard.made(value, states[axis], wanted[axis], summed[axis])
                now[axis] = wanted[axis]
        return value

    def over_replicas(self, need: OperandNeed, states: Sequence[States], value: fx.Node) -> fx.Node:
        """Sum over replicas what an op needs the sum of, or what its cotangent must be summed of.

        `states` are those of the value inside the stages of all replicas. Its cotangent comes as it goes with these:
        what its readers give back of it is summed inside the stages before.
        """
        node, batch = need.node, self.deduced.batch
        state = batch.states[node]
        summed = need.summed_cotangent and node not in batch.summed_cotangents
        if len(states) == 1 or (state == need.state and not summed):
            return value
        replicas = [stages[0] for stages in self.deduced.annotated.stages]
        summands = self.deduced.across_states(node, states, replicas, "partial")
        target = self.deduced.across_states(node, states, replicas, "duplicate")
        source, back = (summands if state == SUMMED else target), cotangent(target)
        if summed:
            back = replace(back, top=summands.top)
        return self.resolved(node, value, resolve(source, target, self.deduced.shape(node), back))

    def resolved(self, node: fx.Node, value: fx.Node, resolution: Resolution, parts: DimParts | None = None) -> fx.Node:
        """Add the calls of a resolution; with `parts`, in those instead of what stands in for them."""
        for made in resolution.calls(self.rank):
            call = resize_call(made, parts.sizes) if parts else made
            value = self.emit(node, COMM_OPS[call.op].overload, value, *call.args)
            if node in self.deduced.annotated.flow.differentiable:
                self.differentiable.add(value)
        return value


def _growth(state: AxisState, wanted: AxisState) -> int:
    """Tell whether a change makes a value smaller (0), leaves its size (1) or makes it larger (2)."""
    if isinstance(state, SplitOn):
        return 1 if isinstance(wanted, SplitOn) else 2
    return 0 if isinstance(wanted, SplitOn) else 1


class _AxisReshard:
    """A change of state along one axis, of a value that is in states `across` on the others."""

    def __init__(self, reshards: Reshards, node: fx.Node, axis: int, across: Sequence[AxisState]) -> None:
        self.reshards, self.deduced, self.node = reshards, reshards.deduced, node
        self.cut = [state.factor for state in across if isinstance(state, SplitOn)]
        self.axis, self.devices = reshards.layout.axes[axis], reshards.layout.peers(reshards.rank)[axis]

    def made(self, value: fx.Node, state: AxisState, wanted: AxisState, summed: bool) -> fx.Node:
        ends = [end.factor for end in (state, wanted) if isinstance(end, SplitOn)]
        is_open = any(factor.size is None for factor in ends)
        if len(ends) > 1 and (is_open or not self.deduced.annotated.sequence.isdisjoint(ends)):
            return self._exchanged(value, state, wanted)
        view = self.deduced.dim_view(self.node, (state, wanted))
        if is_open:
            return self._in_shares(value, (state, wanted), summed, view)
        source, target = (self._annotation(end, view) for end in (state, wanted))
        back = self._annotation(SUMMED) if summed else cotangent(target)
        shape = self._shape(ends)
        if view is None:
            return self._resolved(value, resolve(source, target, shape, back))
        return self._in_view(value, resolve(source, target, view.shape(shape), back), view, state)

    def _exchanged(self, value: fx.Node, state: AxisState, wanted: AxisState) -> fx.Node:
        """Cut a value in other parts: what a gather joins is cut at once, so that each device gets its part alone."""
        gather, cut = self._call(state, WHOLE), self._call(WHOLE, wanted)
        if gather is None or cut is None:
            return self.made(self.made(value, state, WHOLE, False), WHOLE, wanted, False)
        (ranks, dim, sizes, *around), (_, joined, parts, *others) = cut.args[:5], gather.args[:5]
        if dim != joined:
            name, args = "all_to_all", (dim, sizes, *around, joined, parts, *others)
        elif around == others:
            name, args = "repartition", (joined, parts, *others, sizes)
        else:  # two factors of one dim
            return self.made(self.made(value, state, WHOLE, False), WHOLE, wanted, False)
        value = self.reshards.emit(self.node, COMM_OPS[name].overload, value, ranks, *args)
        if self.node in self.deduced.annotated.flow.differentiable:
            self.reshards.differentiable.add(value)
        return value

    def _call(self, state: AxisState, wanted: AxisState) -> OpCall | None:
        """Return the call that joins parts or cuts them; None where a dim must be seen as three for it."""
        end = next(end for end in (state, wanted) if isinstance(end, SplitOn))
        factor = end.factor
        if self.deduced.dim_view(self.node, (state, wanted)) is not None:
            return None
        shape, is_open = list(self._shape([factor])), factor.size is None
        if is_open:
            split = self._axis(end)
            assert isinstance(split, Split)
            shape[split.dim] = split.outer * sum(split.units) * split.inner
        source, target = (self._annotation(end) for end in (state, wanted))
        (call,) = resolve(source, target, shape).calls(self.reshards.rank)
        return resize_call(call, self.reshards.sizes.parts(factor, end.segment).sizes) if is_open else call

    def _in_view(self, value: fx.Node, resolution: Resolution, view: DimView, state: AxisState) -> fx.Node:
        """See a dim as three while the value changes its state."""
        factor, emit = view.factor, self.reshards.emit
        part: Size | None = factor.size
        if isinstance(state, SplitOn) and state.factor == factor:
            part = self.reshards.sizes.part(factor, state.segment)
        assert isinstance(part, int), "a factor that shares its dim has a fixed size"
        moved = self._resolved(emit(self.node, *view.unflattened(value, part)), resolution)
        return emit(self.node, *view.flattened(moved))

    def _in_shares(
        self, value: fx.Node, ends: tuple[AxisState, AxisState], summed: bool, view: DimView | None
    ) -> fx.Node:
        """Cut or join a dim whose length only the run tells: as one of as many entries as there are shares."""
        cut = next(end for end in ends if isinstance(end, SplitOn))
        split, told = self._axis(cut, view), self._shape([cut.factor])
        shape = list(told if view is None else view.shape(told))
        assert isinstance(split, Split)
        shape[split.dim] = split.outer * sum(split.units) * split.inner
        source, target = (self._annotation(end, view) for end in ends)
        back = self._annotation(SUMMED) if summed else cotangent(target)
        resolution = resolve(source, target, shape, back)
        parts = self.reshards.sizes.parts(cut.factor, cut.segment)
        if view is None:
            return self._resolved(value, resolution, parts)
        length = self.reshards.sizes.part(cut.factor, cut.segment) if ends[0] == cut else parts.length
        made = self._resolved(self._unflattened(value, view, length), resolution, parts)
        return self.reshards.emit(self.node, *view.flattened(made))

    def _unflattened(self, value: fx.Node, view: DimView, length: Size) -> fx.Node:
        """See a dim as three, of which every size is given: beside an empty part none could be told from the others."""
        classes = self.deduced.annotated.factors.dims(self.node)[view.dim]
        outer, inner = self.reshards.sizes.around(view.factor, classes)
        return self.reshards.emit(self.node, aten.unflatten.int, value, view.dim, [outer, length, inner])

    def _resolved(self, value: fx.Node, resolution: Resolution, parts: DimParts | None = None) -> fx.Node:
        return self.reshards.resolved(self.node, value, resolution, parts)

    def _annotation(self, state: AxisState, view: DimView | None = None) -> Annotation:
        return Annotation.on(self.devices, self._axis(state, view))

    def _axis(self, state: AxisState, view: DimView | None = None) -> State:
        parts = {factor: part for factor in self.cut if isinstance(part := self.reshards.sizes.part(factor), int)}
        return self.deduced.axis(self.node, state, self.axis, view, parts)

    def _shape(self, ends: Sequence[FactorClass]) -> Shape:
        """Return the shape of what the devices along the axis share; None where only the run tells."""
        shape = self.deduced.shape(self.node)
        for factor in self.cut:
            dim, part = self._dim(factor), self.reshards.sizes.part(factor)
            size, whole = shape[dim], factor.size
            is_told = size is not None and whole is not None and isinstance(part, int)
            if dim in map(self._dim, ends) and not is_told:
                raise cut_twice(self.node, dim, self.reshards.layout)
            local = size // whole * part if size is not None and whole is not None and isinstance(part, int) else None
            shape = (*shape[:dim], local, *shape[dim + 1 :])
        return shape

    def _dim(self, factor: FactorClass) -> int:
        dims = self.deduced.annotated.factors.dims(self.node)
        return next(i for i, classes in enumerate(dims) if factor in classes)
