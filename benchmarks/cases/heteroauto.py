"""Clusters of unlike chips for HeteroAuto; benchmarks and tests share them.

H2's tables of chips are not at hand, so these kinds are synthetic: 1.0, 0.9, 0.4 and 0.7 times the peak of an A100 with
96, 64, 32 and 32 GB, so that none is better than another in everything. The model is of the 100B class: 96 layers of
width 8192, 103 billion parameters, one sequence of 4096 tokens as micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.heteroauto.chip_cost import HeteroResult
from hetu_fx.planner.search.heteroauto.chip_problem import ChipKind, EndCosts, HeteroProblem, Layer
from hetu_fx.planner.search.heteroauto.search import search

LAYERS, WIDTH, INNER, KEY_WIDTH, TOKENS, VOCABULARY = 96, 8192, 36864, 1024, 4096, 92544
LAYER_PARAMETERS = 2 * WIDTH * (WIDTH + KEY_WIDTH) + 3 * WIDTH * INNER
TABLE_PARAMETERS = VOCABULARY * WIDTH

_FLOPS = 2 * LAYER_PARAMETERS * TOKENS + 4 * TOKENS**2 * WIDTH  # of a layer's forward
_BOUNDARY_BYTES = 2 * TOKENS * WIDTH
_KEPT_BYTES = 34 * TOKENS * WIDTH  # of a layer whose attention is not materialised (Korthikanti et al., section 4.1)
_A100 = 312e12
_REACHED = 0.5  # of the peak
_GB = 1e9

_EDGE = TABLE_PARAMETERS / LAYER_PARAMETERS
_BEFORE = EndCosts(parameters=_EDGE)
_AFTER = EndCosts(work=2 * TABLE_PARAMETERS * TOKENS / _FLOPS, parameters=_EDGE, kept=VOCABULARY / (17 * WIDTH))


def chips(
    name: str,
    count: int,
    *,
    per_node: int = 8,
    gigabytes: float,
    speed: float,
    inside: float = 2e11,
    nic: float = 2.5e10,
) -> ChipKind:
    """Return a kind of `speed` times an A100's peak."""
    layers = {1 << i: _layer(1 << i, speed, inside) for i in range(per_node.bit_length()) if 1 << i <= per_node}
    nodes = (per_node,) * (count // per_node)
    links = Link(inside, 1e-5), Link(nic, 2e-5)
    return ChipKind(name, nodes, gigabytes * _GB, layers, *links, update_seconds_per_byte=1 / 2e11)


def _layer(degree: int, speed: float, inside: float) -> Layer:
    """Return a layer whose group shares the sequence: four turns around the ring forward, four backward."""
    turns = 4 * (degree - 1) / degree * _BOUNDARY_BYTES / inside
    forward = _FLOPS / degree / (speed * _A100 * _REACHED)
    return Layer(
        forward_seconds=forward + turns,
        backward_seconds=2 * forward + turns,
        parameter_bytes=4 * LAYER_PARAMETERS / degree,
        kept_bytes=_KEPT_BYTES / degree,
        input_bytes=_BOUNDARY_BYTES / degree,
    )


def cluster(kinds: tuple[ChipKind, ...], micro_batches: int = 512) -> HeteroProblem:
    """Return the model on these kinds, 100 Gbit/s between them."""
    return HeteroProblem(
        kinds, LAYERS, micro_batches, Link(1.25e10, 5e-5), _BOUNDARY_BYTES, before=_BEFORE, after=_AFTER
    )


def four_kinds(chips_of_each: int) -> HeteroProblem:
    """Return the model on so many chips of each of four kinds."""
    return cluster(
        (
            chips("A", chips_of_each, per_node=16, gigabytes=96, speed=1.0),
            chips("B", chips_of_each, gigabytes=64, speed=0.9),
            chips("C", chips_of_each, gigabytes=32, speed=0.4),
            chips("D", chips_of_each, gigabytes=32, speed=0.7),
        )
    )


def superlinear() -> HeteroProblem:
    """Return 64 fast chips of little memory beside 64 slow ones of much: together faster than the sum of both."""
    return cluster((chips("slow", 64, gigabytes=96, speed=0.4), chips("fast", 64, gigabytes=30, speed=1.0)))


def ablations(problem: HeteroProblem) -> dict[str, HeteroProblem]:
    """Return the problem with one thing at a time switched off, by what is left out."""
    free = problem.freedom
    return {
        "nothing": problem,
        "limits of memory": _with_kinds(problem, memory_bytes=1e15),
        "the cost of recomputing": _with_kinds(problem, recomputed_share=0.0),
        "uneven layers": replace(problem, freedom=replace(free, uneven_layers=False)),
        "groups of two sizes in a kind": replace(problem, freedom=replace(free, split_kinds=False)),
        "a group size per kind": replace(problem, freedom=replace(free, split_kinds=False, degree_per_kind=False)),
        "slice and gather": replace(problem, freedom=replace(free, slice_and_gather=False)),
        "recomputing": replace(problem, freedom=replace(free, recompute=False)),
    }


def _with_kinds(problem: HeteroProblem, **changes: float) -> HeteroProblem:
    return replace(problem, kinds=tuple(replace(kind, **changes) for kind in problem.kinds))


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """The best plan of all chips, and the best of each kind alone with the same batch; None where that does not fit."""

    together: HeteroResult
    alone: Mapping[str, HeteroResult | None]

    @property
    def ratio(self) -> float:
        """Return tokens per second together over the sum of those alone; above 1 it is superlinear."""
        parts = math.fsum(1 / result.seconds for result in self.alone.values() if result is not None)
        return 1 / self.together.seconds / parts if parts else math.inf


def speed_up(problem: HeteroProblem) -> SpeedUp:
    """Plan for all kinds together and for each alone, which chooses its own number of replicas."""
    parts = {kind.name: replace(problem, kinds=(kind,), replicas=()) for kind in problem.kinds}
    return SpeedUp(search(problem), {name: _found(part) for name, part in parts.items()})


def _found(problem: HeteroProblem) -> HeteroResult | None:
    try:
        return search(problem)
    except PlanError:
        return None  # too large for this kind alone
