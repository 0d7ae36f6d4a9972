"""Seconds and bytes of a pipeline over kinds of chips (H2's cost model).

Stage k of a pipeline takes s_k seconds for forward and backward of a micro-batch, what it hands over included, and
u_k seconds at the end of the step to sync gradients, update and gather parameters. With m micro-batches a step takes

    T = max_k [ m s_k + bubble x (sum of s_j over the other stages j) + u_k ]                          (1)

which for equal stages and 1F1B (bubble 1) is the usual (m + p - 1) s. A stage that computes its activations again
adds the recomputed share of its forward to s_k. A chip of a stage at which f micro-batches are in flight holds

    states(l) + f l kept                        or, where activations are computed again,              (2)
    states(l) + f l input + one layer's kept                                                           (3)

Both messages between two stages are charged to the one in front. A message of S bytes to a group of b chips from one
of a takes, with every receiver getting all of it over its own link, or with min(a, b) slices that are gathered inside
the receiving node (SR&AG),

    latency + max(1, b / a) S / link        or        latency + S / min(a, b) / link + gather(S, b)    (4)

whichever is less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.search.heteroauto.problem import ChipKind, EndCosts, HeteroProblem, Layer
from hetu_fx.planner.values.device_memory import fixed_bytes, in_flight

Numbers = NDArray[np.float64]
Amount = TypeVar("Amount", float, Numbers)
"""A number, or many at once."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Tensor parallel groups of one kind and size."""

    kind: ChipKind
    degree: int

    def __hash__(self) -> int:
        return hash((self.kind.name, self.degree))  # asked for millions of times

    @property
    def layer(self) -> Layer:
        """Return what a layer costs on one of them."""
        return self.kind.layers[self.degree]


@dataclass(frozen=True, slots=True)
class HeteroStage:
    """A stage: the groups that it stands on, one for each replica, its layers, and if they are computed again."""

    groups: Groups
    layers: int
    recompute: bool = False

    def __str__(self) -> str:
        again = " again" if self.recompute else ""
        return f"{self.groups.kind.name}/{self.groups.degree}x{self.layers}{again}"


def step_seconds(problem: HeteroProblem, replicas: int, stages: Sequence[HeteroStage]) -> float:
    """Return (1) for equal replicas of a pipeline; infinite where a stage does not fit its memory."""
    count = problem.num_micro_batches // replicas
    seconds, ends = [], []
    for index, stage in enumerate(stages):
        edge = edge_of(problem, index == 0, index == len(stages) - 1)
        flying = in_flight(problem.schedule, index, len(stages), count)
        if held_bytes(problem, replicas, stage, edge, flying) > stage.groups.kind.memory_bytes:
            return math.inf
        behind = [hand_over_seconds(problem, stage.groups, other.groups) for other in stages[index + 1 : index + 2]]
        seconds.append(work_seconds(stage.groups, float(stage.layers), edge, stage.recompute) + sum(behind))
        ends.append(update_seconds(problem, replicas, stage.groups, float(stage.layers), edge))
    largest = max((count - problem.bubble) * s + u for s, u in zip(seconds, ends, strict=True))
    return problem.bubble * math.fsum(seconds) + largest


def edge_of(problem: HeteroProblem, is_first: bool, is_last: bool) -> EndCosts:
    """Return what a stage holds besides layers."""
    nothing = EndCosts()
    return (problem.before if is_first else nothing) + (problem.after if is_last else nothing)


def work_seconds(groups: Groups, layers: Amount, edge: EndCosts, recompute: bool) -> Amount:
    """Return forward and backward of a micro-batch."""
    layer = groups.layer
    again = groups.kind.recomputed_share * layer.forward_seconds if recompute else 0.0
    return (layers + edge.work) * (layer.forward_seconds + layer.backward_seconds + again)


def held_bytes(problem: HeteroProblem, replicas: int, stage: HeteroStage, edge: EndCosts, flying: int) -> float:
    """Return (2) or (3) of a chip."""
    states = state_bytes(problem, replicas, stage.groups, stage.layers, edge)
    return states + activation_bytes(stage.groups.layer, float(stage.layers), edge, float(flying), stage.recompute)


def state_bytes(problem: HeteroProblem, replicas: int, groups: Groups, layers: int, edge: EndCosts) -> int:
    """Return the bytes of parameters, gradients and optimizer states that a chip holds."""
    parameters = groups.layer.parameter_bytes * (layers + edge.parameters)
    return sum(count for _, count in fixed_bytes(parameters, zero=problem.zero, num_replicas=replicas))


def activation_bytes(layer: Layer, layers: Amount, edge: EndCosts, flying: Amount, recompute: bool) -> Amount:
    """Return the bytes that a chip keeps for the backward of so many micro-batches in flight."""
    if recompute:
        return flying * layers * layer.input_bytes + max(1.0, edge.kept) * layer.kept_bytes
    return flying * (layers + edge.kept) * layer.kept_bytes


def update_seconds(problem: HeteroProblem, replicas: int, groups: Groups, layers: Amount, edge: EndCosts) -> Amount:
    """Return the seconds of gradient sync (and gather of parameters: two turns around the replicas) and update."""
    held = (layers + edge.parameters) * groups.layer.parameter_bytes
    link = groups.kind.across
    turn = (replicas - 1) * (link.latency_seconds + held / (replicas * link.bytes_per_second))
    owned = held / (replicas if problem.zero else 1)
    return 2 * turn + owned * groups.kind.update_seconds_per_byte


def hand_over_seconds(problem: HeteroProblem, front: Groups, behind: Groups) -> float:
    """Return the seconds in which a stage sends a micro-batch to the one behind, and gets its gradient."""
    link = front.kind.across if front.kind == behind.kind else problem.between
    return sum(
        transfer_seconds(problem, source.degree, target, link) for source, target in ((front, behind), (behind, front))
    )


def transfer_seconds(problem: HeteroProblem, senders: int, target: Groups, link: Link) -> float:
    """Return (4) for a micro-batch's boundary."""
    size, receivers = problem.boundary_bytes, target.degree
    whole = link.seconds(max(1.0, receivers / senders) * size)
    if not problem.freedom.slice_and_gather:
        return whole
    inside = target.kind.inside
    gather = (receivers - 1) * inside.seconds(size / receivers)
    return min(whole, link.seconds(size / min(senders, receivers)) + gather)
