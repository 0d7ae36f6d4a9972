"""Seconds of the end of a step: gradients to their owners, the update, values back to where they are read.

Of each of these three terms the step takes what the slowest device takes, one after another. What travels is copied
too, into messages and out of them; an update takes what it moves through memory, and what a step takes besides.

A plan takes owners for equal, so that bytes travel around rings (`sync_seconds`). Where every parameter's owners are
given, they travel in messages (`hetu_fx.planner.price.homes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.ring import turn_seconds

TURN_MOVES = 4  # what goes around a ring is read and written on its way into the message, and out of it
OPTIMIZER_MOVES = 7  # Adam reads parameter, gradient and two moments, and writes all but the gradient


def end_seconds(ends: Iterable[Sequence[float]]) -> float:
    """Return what the end of a step takes, from (gradient sync, gather, optimizer) seconds of each device."""
    return math.fsum(max(column) for column in zip(*ends, strict=True))


def sync_seconds(num_bytes: float, ranks: Sequence[int], cluster: Cluster, zero: int) -> tuple[float, float]:
    """Return (gradient sync, parameter gather) seconds over one device of each replica.

    Zero 1: gradients are reduce-scattered and parameters gathered, a turn around the ring each. Zero 0:
    gradients are all-reduced, two turns, and nothing is gathered.
    """
    if len(ranks) < 2:
        return 0.0, 0.0
    copies = copy_seconds(num_bytes * TURN_MOVES, map(cluster.device, ranks))
    turn = turn_seconds(num_bytes, ranks, cluster) + copies
    return (turn, turn) if zero else (2 * turn, 0.0)


def copy_seconds(num_bytes: float, devices: Iterable[Device]) -> float:
    """Return the seconds until each of the devices has moved so many bytes through its memory."""
    return num_bytes * max(device.flops_per_byte / device.speed for device in devices)


def update_line(num_bytes: float, device: Device, seconds_per_byte: float | None = None) -> Line:
    """Return the seconds of the optimizer, and of what a step takes besides, by the share of the bytes that is owned.

    `seconds_per_byte` is what the update of a byte is known to take; left out: `optimizer_seconds`.
    """
    if seconds_per_byte is None:
        return Line(device.step_now, optimizer_seconds(num_bytes, device))
    return Line(device.step_now, num_bytes * seconds_per_byte)


def optimizer_seconds(num_bytes: float, device: Device) -> float:
    """Return the seconds of the update of so many bytes of owned parameters."""
    return num_bytes * OPTIMIZER_MOVES * device.flops_per_byte / device.speed
