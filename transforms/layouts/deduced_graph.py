"""A graph whose every value has a state, and what that means in annotations over devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from hetu_fx.annotations.annotation import Annotation, DeviceGroup
from hetu_fx.base.once import once
from hetu_fx.errors import PlanError
from hetu_fx.graph.graph import Leaf, OutputKind
from hetu_fx.transforms.layouts.annotated_graph import StageLayout
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.layouts.shardings import StageShardings
from hetu_fx.transforms.layouts.states import SUMMED, States, Summed


@dataclass(frozen=True, eq=False)
class DeducedGraph(StageShardings):
    """An annotated graph whose every value has a state on all axes; the same for all devices."""

    batch: AxisDeduction
    tensor_split: AxisDeduction
    tensor_whole: AxisDeduction
    context: AxisDeduction
    fine: AxisDeduction

    def inside(self, layout: StageLayout) -> tuple[AxisDeduction, ...]:
        """Return the deductions of the axes inside a stage, the outer one first."""
        cut = zip((self.context, self.tensor_split, self.fine), layout.axes, strict=True)
        return tuple(deduction if axis.ways > 1 else self.tensor_whole for deduction, axis in cut)

    def states(self, node: fx.Node, layout: StageLayout) -> States:
        """Return how a value lies along the axes inside a stage once it can be read."""
        return tuple(deduction.states[node] for deduction in self.inside(layout))

    def value_annotation(self, node: fx.Node, layout: StageLayout) -> Annotation:
        """Return where a value lies within one stage once it can be read."""
        return Annotation((DeviceGroup(layout.devices),), (self.sharding(node, self.states(node, layout), layout),))

    def across(self, node: fx.Node, layouts: tuple[StageLayout, ...], top: str, summed: bool = False) -> Annotation:
        """Return a value's annotation over several stages, one group each.

        `top` is "duplicate" or "partial"; with `summed`, a stage in which nothing sums the value's cotangent is
        partial inside too.
        """
        states = tuple(self._summed(node, layout) if summed else self.states(node, layout) for layout in layouts)
        return self.across_states(node, states, layouts, top)

    def _summed(self, node: fx.Node, layout: StageLayout) -> States:
        """Return how a value's gradient lies along the axes inside a stage before it is synchronised."""
        return tuple(
            SUMMED if node in deduction.summed_cotangents else deduction.states[node]
            for deduction in self.inside(layout)
        )

    @once
    def parameter_annotations(self, leaf: Leaf) -> tuple[Annotation, Annotation]:
        """Return where a parameter lies when it is read, and where its gradient lies before it is synchronised.

        Replicas, and stages that share a tied parameter, each have a summand of the gradient.
        """
        duplicated = self.annotated.splits_batch and leaf.node not in self.batch.summed_cotangents
        trained = leaf.node in self.annotated.flow.differentiable
        if duplicated and trained and len(self.readers(leaf)) > len(self.annotated.stages):
            raise PlanError(
                f"parameter {leaf.name!r} is read by several stages, and by ops that do not see the batch\nhint: use a "
                f"plan whose pipelines have one stage"
            )
        kind = "duplicate" if duplicated and trained else "partial"
        # In the gradient of a copy that chunks of one stage read, autograd adds up theirs.
        holders = self.holders(leaf)
        return self.across(leaf.node, holders, "duplicate"), self.across(leaf.node, holders, kind, summed=True)

    @cached_property
    def talks_across_replicas(self) -> bool:
        """Tell whether some op in the middle of the model needs a sum over all replicas."""
        updates = self.annotated.graph.outputs_of(OutputKind.BUFFER_UPDATE)
        return self.batch.talks or any(isinstance(self.batch.states.get(node), Summed) for _, node in updates)
