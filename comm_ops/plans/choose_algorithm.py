"""Which algorithm a collective had better take, from what each costs on the links.

Prices are affine in bytes, so that a choice is a bound in bytes, rounded up to a power of two: measurements that
differ a little give the same graph. By the ring's price two levels never lose by latency, only where the links
inside nodes are hardly faster than those between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hetu_fx.comm_ops.plans.algorithm import FLAT, Algorithm
from hetu_fx.comm_ops.plans.cost import (
    Cost,
    Topology,
    all_reduce_cost,
    cheapest_tiers,
    padded_cost,
    ring_cost,
    two_level_all_reduce_cost,
    two_level_ring_cost,
)

CHOICES = ("auto", "flat", "two_level", "padded")
ChooseAlgorithm = Callable[[Sequence[Any], Topology, str], Algorithm]
_MANY = 1 << 40  # bytes that make latency vanish


def number_nodes(ranks: Sequence[int], topology: Topology) -> tuple[int, ...]:
    """Number the nodes of `ranks` from 0, in order of appearance."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(topology.node_of(rank), len(numbers)) for rank in ranks)


def crossover(one: Callable[[float], float], other: Callable[[float], float]) -> int | None:
    """Return the bytes from which `other` is cheaper than `one`; None: never. Both are affine in bytes."""
    loss = other(0) - one(0)
    gain = (one(_MANY) - one(0)) - (other(_MANY) - other(0))
    if gain <= 1e-9 * one(_MANY):
        return None
    return 0 if loss <= 0 else 1 << max(0, math.ceil(math.log2(loss / gain * _MANY)))


def bound(choice: str, one: Callable[[float], float], other: Callable[[float], float]) -> int | None:
    """Return the bytes from which to go in two levels (`other`) under a choice."""
    if choice == "two_level":
        return 0
    return crossover(one, other) if choice == "auto" else None


def always_flat(args: Sequence[Any], topology: Topology, choice: str) -> Algorithm:
    """Choose the algorithm of an op that knows one way only."""
    return FLAT


def algorithm_of_sums(args: Sequence[Any], topology: Topology, choice: str) -> Algorithm:
    """Choose the algorithm of an all-reduce over args[0]."""
    return _two_level(args[0], topology, choice, all_reduce_cost, two_level_all_reduce_cost)


def algorithm_of_parts(args: Sequence[Any], topology: Topology, choice: str) -> Algorithm:
    """Choose the algorithm of an all-gather or reduce-scatter over args[0], of parts args[2] if they are told."""
    levels = _two_level(args[0], topology, choice, ring_cost, two_level_ring_cost)
    sizes = args[2] if len(args) > 2 else ()
    if len(set(sizes)) < 2 or choice not in ("auto", "padded"):
        return levels
    return replace(levels, padded_below=_padded_below(args[0], sizes, topology, choice))


def _two_level(ranks: Sequence[int], topology: Topology, choice: str, flat: Cost, levels: Cost) -> Algorithm:
    tiers = cheapest_tiers(ranks, topology)
    if not tiers:
        return FLAT
    least = bound(choice, lambda size: flat(size, ranks, topology), lambda size: levels(size, ranks, topology))
    return FLAT if least is None else Algorithm(tiers[0], least, outer=tiers[1:])


def _padded_below(ranks: Sequence[int], sizes: Sequence[int], topology: Topology, choice: str) -> int:
    if choice == "padded":
        return _MANY
    swell = max(sizes) * len(sizes) / sum(sizes)
    grouped = crossover(
        lambda size: padded_cost(size * swell, ranks, topology), lambda size: ring_cost(size, ranks, topology)
    )
    return _MANY if grouped is None else grouped
