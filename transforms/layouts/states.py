"""How one value of the graph lies on one axis: whole, split on a factor class, or as summands.

A plan has four axes: the batch axis (rows over pipelines and micro-batches, HSPMD's top tier), and the context, the
tensor and the fine axis (one stage's devices, its bottom tier). Deduction works on one axis at a time and never sees a
device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass


@dataclass(frozen=True, slots=True)
class Whole:
    """Every coordinate of the axis holds the whole value."""


@dataclass(frozen=True, slots=True)
class SplitOn:
    """Each coordinate holds its part of `factor`, by the ratios of a segment of a program; of 0 by the stage's own."""

    factor: FactorClass
    segment: int = 0


@dataclass(frozen=True, slots=True)
class Summed:
    """Each coordinate holds a summand; the value is their sum."""


@dataclass(frozen=True, slots=True)
class DisjointPartial(Summed):
    """Summands that do not overlap: each coordinate holds the entries that its part of `factor` makes, zeros elsewhere.

    What a group of experts makes of the rows that are sent to it, say.
    """

    factor: FactorClass


AxisState = Whole | SplitOn | Summed
States = tuple[AxisState, ...]
"""How a value lies along the axes inside a stage, the outer one first."""

WHOLE = Whole()
SUMMED = Summed()


@dataclass(frozen=True, slots=True)
class OperandNeed:
    """What an op needs of one operand on one axis.

    Attributes:
        node: the operand.
        state: the state the op computes with.
        summed_cotangent: the op gives back a summand of the operand's cotangent on every coordinate.
        first_only: the operand is added to a sum that is spread over the axis, so only the first coordinate adds it.
    """

    node: fx.Node
    state: AxisState
    summed_cotangent: bool = False
    first_only: bool = False


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """How one op runs on one axis: the factor it computes a part of (None: whole), its needs and its result.

    With `travels`, operands that it reads whole are needed in parts, which go round the devices. With `factors`, the
    gradients of parameters that it reads whole are made on every device from what they are products of. `segment` is
    that whose ratios the parts of `factor` follow.
    """

    factor: FactorClass | None
    needs: tuple[OperandNeed, ...]
    result: AxisState
    travels: bool = False
    factors: bool = False
    segment: int = 0
