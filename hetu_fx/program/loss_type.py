"""What the loss of a captured graph is by its rules: only what is proven to be a sum over rows may be shared out."""

from __future__ import annotations

from enum import Enum

from hetu_fx.deduction.factors.row_degrees import row_degrees
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.layouts.states import Summed


class LossType(Enum):
    """How a loss comes of the rows of a batch."""

    SUM = "a sum over rows"  # what replicas make of their rows adds up, and grows with their number
    MEAN = "a mean over rows"  # what they make adds up to it, by counts of the whole batch
    NEITHER = "neither a sum nor a mean over rows"


def loss_type(analysed: AnalysedGraph, rows: AxisDeduction | None) -> LossType:
    """Return what a graph's loss is; NEITHER where there is none, or `rows` are not known to add up to it."""
    loss = analysed.graph.loss
    if loss is None or rows is None or not isinstance(rows.states.get(loss), Summed):
        return LossType.NEITHER
    degree = row_degrees(analysed.graph, analysed.factors).get(loss)
    return {1: LossType.SUM, 0: LossType.MEAN}.get(degree, LossType.NEITHER)  # type: ignore[arg-type]
