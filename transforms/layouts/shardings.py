"""How values lie over a plan's devices, in annotations, by their states along the axes of stages.

How leaves lie follows from the plan alone, before anything of the ops is deduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Duplicate, Partial, Shape, Sharding, Split, State
from hetu_fx.deduction.factors.factors import FactorClass
from hetu_fx.errors import DeductionError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Leaf, LeafKind
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph, StageAxis, StageLayout, stage_nodes
from hetu_fx.transforms.layouts.axis import axis_strategies
from hetu_fx.transforms.layouts.states import WHOLE, AxisState, SplitOn, States, Summed, Whole

aten = torch.ops.aten

NO_PARTS: Mapping[FactorClass, int] = {}


@dataclass(frozen=True, slots=True)
class DimView:
    """A dim seen as three, (outer, factor, inner), while a value changes its state; before and after it is one dim.

    For a split factor that shares its dim with rows or positions, whose number no annotation can say: of `outer` and
    `inner`, the sizes around the factor, one may be None (unknown), of a factor of unknown size both.
    """

    dim: int
    factor: FactorClass
    outer: int | None
    inner: int | None

    def shape(self, shape: Shape) -> Shape:
        """Return the logical shape of a value seen so."""
        return (*shape[: self.dim], self.outer, self.factor.size, self.inner, *shape[self.dim + 1 :])

    def unflattened(self, value: fx.Node, part: int) -> tuple[Any, ...]:
        """Return the op and the arguments that make the dim three; `part` of the factor is the device's."""
        sizes = [-1 if size is None else size for size in (self.outer, part, self.inner)]
        return aten.unflatten.int, value, self.dim, sizes

    def flattened(self, value: fx.Node) -> tuple[Any, ...]:
        """Return the op and the arguments that make one dim of the three again."""
        return aten.flatten.using_ints, value, self.dim, self.dim + 2


@dataclass(frozen=True, eq=False)
class StageShardings:
    """What an annotated graph says of where values lie."""

    annotated: AnnotatedGraph

    def parameters_read(self) -> Mapping[str, Annotation]:
        """Return where each parameter lies when it is read, by name; those that no stage reads are left out."""
        one = self.annotated
        tensor = axis_strategies(one.factors, one.flow, one.classes, choices=one.choices)
        along = _whole, tensor.of_leaf, axis_strategies(one.factors, one.flow, one.fine).of_leaf

        def states(leaf: Leaf, layout: StageLayout) -> States:
            lie = zip(along, layout.axes, strict=True)
            return tuple(state(leaf) if axis.ways > 1 else WHOLE for state, axis in lie)

        found = ((leaf, self.holders(leaf)) for leaf in self.parameters())
        return {
            leaf.name: self.across_states(leaf.node, [states(leaf, one) for one in layouts], layouts, "duplicate")
            for leaf, layouts in found
        }

    def shape(self, node: fx.Node) -> Shape:
        """Return a value's shape; symbolic sizes are None, where the classes of the dim do not tell them."""
        told = self.annotated.factors.sizes(node)
        return tuple(told[i] if meta.is_symbolic(size) else int(size) for i, size in enumerate(meta.shape(node)))

    def axis(
        self,
        node: fx.Node,
        state: AxisState,
        axis: StageAxis,
        view: DimView | None = None,
        parts: Mapping[FactorClass, int] = NO_PARTS,
    ) -> State:
        """Return the annotation's axis for a value in `state` along an axis of a stage, its dims as `view` has them.

        `parts` is what the devices along the axis have of classes that other axes cut.
        """
        match state:
            case Whole():
                return Duplicate(axis.ways)
            case Summed():
                return Partial(axis.ways)
            case SplitOn():
                return self._split(node, state, axis, view, parts)

    def _split(
        self,
        node: fx.Node,
        state: SplitOn,
        axis: StageAxis,
        view: DimView | None,
        parts: Mapping[FactorClass, int],
    ) -> Split:
        factor, sizes = state.factor, axis.parts(state.factor, state.segment)
        dim, outer, inner = self._place(node, factor)
        classes = self.annotated.factors.dims(node)[dim]
        for other in parts.keys() & set(classes):
            if other.size is None or outer is None or inner is None:
                continue
            if classes.index(other) < classes.index(factor):
                outer = outer // other.size * parts[other]
            else:
                inner = inner // other.size * parts[other]
        if view is not None and factor == view.factor:
            return Split(dim + 1, sizes)
        if outer is None or inner is None:
            raise DeductionError(
                f"dim {dim} of '{node.name}' ({meta.source_line(node)}) mixes rows or positions with a dimension that "
                f"the plan splits over {axis.ways} devices\nhint: use a plan without tensor parallelism there"
            )
        beyond = view is not None and dim > view.dim
        return Split(dim + 2 if beyond else dim, sizes, outer, inner)

    def _place(self, node: fx.Node, factor: FactorClass) -> tuple[int, int | None, int | None]:
        """Return the dim that a factor is in, and the sizes before and after it there, None where symbolic."""
        dims = self.annotated.factors.dims(node)
        dim = next(i for i, classes in enumerate(dims) if factor in classes)
        return (dim, *self.annotated.factors.sub_factor(node, dim, factor))

    def dim_view(self, node: fx.Node, states: tuple[AxisState, ...]) -> DimView | None:
        """Return the dim that must be seen as three to cut it as `states` say, or None."""
        for state in states:
            if isinstance(state, SplitOn):
                dim, outer, inner = self._place(node, state.factor)
                is_open = state.factor.size is None and None in (outer, inner)
                if is_open or (outer is None) != (inner is None):
                    return DimView(dim, state.factor, outer, inner)
        return None

    def sharding(self, node: fx.Node, states: States, layout: StageLayout) -> Sharding:
        """Return how the devices of a stage share a value in `states`.

        Raises:
            DeductionError: two axes cut one dim of it, and not the fine one what the other has one part of.
        """
        axes = [self.axis(node, state, axis) for state, axis in zip(states, layout.axes, strict=True)]
        match axes:
            case [context, Split() as tensor, Split() as fine] if tensor.dim == fine.dim:
                axes = [context, self._joined(node, states, layout, (tensor, fine))]
        dims = [axis.dim for axis in axes if isinstance(axis, Split)]
        if len(dims) > len(set(dims)):
            raise cut_twice(node, dims[0], layout)
        return Sharding(tuple(axes))

    def _joined(self, node: fx.Node, states: States, layout: StageLayout, axes: tuple[Split, Split]) -> Split:
        """Return as one cut what two axes make of a dim: every device has one part of the outer class.

        Raises:
            DeductionError: a device has several, of each of which it would have a piece.
        """
        outer, inner = (state.factor for state in states[1:] if isinstance(state, SplitOn))
        classes = self.annotated.factors.dims(node)[axes[0].dim]
        follows = classes[classes.index(outer) :][:2] == (outer, inner)
        if not follows or set(layout.tensor.sizes[outer]) != {1}:
            raise cut_twice(node, axes[0].dim, layout)
        return Split(axes[0].dim, layout.fine.sizes[inner] * layout.tensor.ways, axes[0].outer, axes[1].inner)

    def across_states(
        self, node: fx.Node, states: Sequence[States], layouts: Sequence[StageLayout], top: str
    ) -> Annotation:
        """Return the annotation over several stages of a value that is in one of `states` inside each."""
        groups = tuple(DeviceGroup(layout.devices) for layout in layouts)
        shardings = [self.sharding(node, inside, layout) for inside, layout in zip(states, layouts, strict=True)]
        ways = len(layouts)
        kind: State | None = None if ways == 1 else Duplicate(ways) if top == "duplicate" else Partial(ways)
        return Annotation(groups, tuple(shardings), kind)

    def holders(self, leaf: Leaf) -> tuple[StageLayout, ...]:
        """Return the stages that hold a leaf: of chunks of one stage, which share a copy, the first that reads it."""
        return tuple({layout.devices: layout for layout in reversed(self.readers(leaf))}.values())[::-1]

    def readers(self, leaf: Leaf) -> tuple[StageLayout, ...]:
        """Return the stages that read a leaf, pipeline after pipeline."""
        return self._readers.get(leaf.node, ())

    @cached_property
    def _readers(self) -> Mapping[fx.Node, tuple[StageLayout, ...]]:
        readers: dict[fx.Node, list[StageLayout]] = {}
        for layout in self.annotated.layouts:
            for node in stage_nodes(self.annotated, layout).needed:
                if node.op == "placeholder":
                    readers.setdefault(node, []).append(layout)
        return {node: tuple(layouts) for node, layouts in readers.items()}

    def parameters(self) -> tuple[Leaf, ...]:
        """Return the parameter leaves that some stage reads."""
        return tuple(leaf for leaf in self.annotated.graph.leaves_of(LeafKind.PARAMETER) if self.readers(leaf))


def _whole(leaf: Leaf) -> AxisState:
    """Tell how a leaf lies along an axis that shares the sequence: whole."""
    return WHOLE


def cut_twice(node: fx.Node, dim: int, layout: StageLayout) -> DeductionError:
    """Return the error for a value of which both axes of a stage cut one dim."""
    return DeductionError(
        f"dim {dim} of '{node.name}' ({meta.source_line(node)}) mixes positions of the sequence with a dimension that "
        f"the plan splits, and both would be cut over devices {list(layout.devices)}\nhint: use a stage that is either "
        f"context or tensor parallel there"
    )
