"""What one rank runs: its graph, what feeds it, what it makes, and what it exchanges with other stages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import sympy
import torch
from torch import fx

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.plans.recomputed import RecomputedOps
from hetu_fx.transforms.layouts.annotated_graph import StageLayout

LogicalShape = tuple[int | sympy.Expr, ...]


class SlotKind(StrEnum):
    """What a placeholder of a device graph is fed with."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    COUNT = "count"
    RANDOM_STATE = "random_state"
    RECEIVED = "received"
    LATER = "later"
    UNITS = "units"


FIXED_SIZES = (SlotKind.PARAMETER, SlotKind.BUFFER, SlotKind.CONSTANT)
"""Placeholders whose values have the same sizes in every step."""
FIXED_PLACES = (SlotKind.PARAMETER, SlotKind.CONSTANT)
"""Those whose values may stand where they stood in the last step: no op writes to them, and they are large."""


class ResultKind(StrEnum):
    """What a result of a device graph is for."""

    LOSS = "loss"
    VALUE = "value"
    BUFFER_UPDATE = "buffer_update"
    CHECK = "check"
    SENT = "sent"


@dataclass(frozen=True)
class GraphSlot:
    """One placeholder of a device graph; `name` is the leaf's name, or the sending node's for RECEIVED.

    LATER and UNITS are no tensors: one collects the products whose weights' gradients wait, the other gathers
    parameters.
    """

    kind: SlotKind
    name: str


@dataclass(frozen=True)
class GraphResult:
    """One result of a device graph; `name` is the output's name, or the node's for SENT."""

    kind: ResultKind
    name: str


@dataclass(frozen=True, eq=False)
class Value:
    """A value that a stage hands to another: its logical shape (int or sympy expression per dim), where it lies."""

    name: str
    shape: LogicalShape
    dtype: torch.dtype
    differentiable: bool
    annotation: Annotation


@dataclass(frozen=True, eq=False)
class Handover:
    """A value that goes from one stage to a later one, forward; its cotangent goes the other way."""

    value: Value
    source: tuple[int, int]
    target: tuple[int, int]
    target_annotation: Annotation


@dataclass(frozen=True, eq=False)
class DeviceGraph:
    """What one rank runs: its stage's graph with local shapes, and what it exchanges with other stages.

    A rank has one for each chunk of its stage; `num_stages` counts chunks as stages. `differentiable` are the
    communications through which a gradient comes back. `recomputed` are runs of ops that stand one after another in the
    graph: what a run makes for itself alone is not kept for backward, but made again, if it is made by `recomputed_ops`
    (`plans.recomputed`).
    """

    rank: int
    layout: StageLayout
    num_stages: int
    graph: fx.Graph
    slots: tuple[GraphSlot, ...]
    results: tuple[GraphResult, ...]
    handovers_in: tuple[Handover, ...]
    handovers_out: tuple[Handover, ...]
    differentiable: frozenset[fx.Node]
    recomputed: tuple[tuple[fx.Node, ...], ...] = ()
    recomputed_ops: RecomputedOps = "all"
