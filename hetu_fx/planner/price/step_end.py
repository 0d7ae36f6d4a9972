"""Seconds of the end of a step: gradients to their owners, the update, values back to where they are read.

Of each of these three terms the step takes what the slowest device takes, one after another. What travels is copied
too, into messages and out of them; an update takes what it moves through memory.

A plan takes owners for equal, each reader of a parameter having an equal share of it, so that bytes travel around rings
(`sync_seconds`). Where every parameter's owners are given they travel in messages (`home_end_seconds`): a device is
busy by what it owns, which it updates, sums the gradients of all readers for, and gives the values of to them. Meetings
are left out then, as they are the same wherever homes are.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import TypeVar

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.base.once import once
from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.comm_ops.plans.cost import messages_cost
from hetu_fx.comm_ops.plans.slices import finest_slices
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.planner.values.device_memory import MOMENTS
from hetu_fx.planner.values.exchanged_values import turn_seconds

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
    turn = _turn(cluster, num_bytes, tuple(ranks))
    return (turn, turn) if zero else (2 * turn, 0.0)


@once
def _turn(cluster: Cluster, num_bytes: float, ranks: tuple[int, ...]) -> float:
    """Return the seconds of a turn around a ring, and of the copies into messages and out of them."""
    return turn_seconds(num_bytes, ranks, cluster) + num_bytes * TURN_MOVES * cluster.copy_seconds(ranks)


def optimizer_seconds(num_bytes: float, device: Device) -> float:
    """Return the seconds of the update of so many bytes of owned parameters."""
    return num_bytes * OPTIMIZER_MOVES * device.flops_per_byte / device.speed


K = TypeVar("K")
Pairs = Mapping[tuple[int, int], float]
"""What travels from each sender to each receiver: bytes, or entries."""


@dataclass(frozen=True, slots=True)
class ParameterHome:
    """A parameter: its global shape and the bytes of an entry, its home, and where it is read (None: nowhere)."""

    shape: tuple[int, ...]
    itemsize: int
    home: Annotation
    read: Annotation | None


def home_end_seconds(
    parameters: Iterable[ParameterHome], cluster: Cluster, update_seconds_per_byte: Mapping[int, float] | None = None
) -> float:
    """Return what the end of a step takes with such homes: gradient sync, gather and update, each of the slowest.

    `update_seconds_per_byte` is what devices take now for each byte of parameters that they own; those that are left
    out take `optimizer_seconds`.
    """
    known = update_seconds_per_byte or {}
    owned: dict[int, float] = defaultdict(float)
    gathered: dict[tuple[int, int], float] = defaultdict(float)
    synced: dict[tuple[int, int], float] = defaultdict(float)
    for one in parameters:
        of_one = _numbers(one.shape, one.home, one.read)
        _add(owned, of_one.owned, one.itemsize)
        _add(gathered, of_one.gathered, one.itemsize)
        _add(synced, of_one.synced, one.itemsize)
    sync, gather = _by_device(synced, cluster), _by_device(gathered, cluster)
    per_byte = ((d, known.get(d.rank, optimizer_seconds(1.0, d))) for d in cluster.devices)
    updates = (owned[device.rank] * seconds for device, seconds in per_byte)
    return end_seconds(zip(sync, gather, updates, strict=True))


def owned_bytes(parameters: Iterable[ParameterHome]) -> dict[int, float]:
    """Return the bytes of parameters that each rank owns, of those that own any."""
    owned: dict[int, float] = defaultdict(float)
    for one in parameters:
        _add(owned, _numbers(one.shape, one.home, one.read).owned, one.itemsize)
    return {rank: num_bytes for rank, num_bytes in owned.items() if num_bytes}


def update_seconds_per_byte(
    measured: Mapping[int, float], owned: Mapping[int, float], cluster: Cluster
) -> dict[int, float]:
    """Return what an owned byte takes each device now, from the seconds that updates of so many bytes took some.

    A device that owns nothing yet takes what the others do, at its speed. Empty where nothing was measured.
    """
    found = {rank: seconds / owned[rank] for rank, seconds in measured.items() if seconds and rank in owned}
    if not found:
        return {}
    work = fmean(seconds * cluster.device(rank).speed for rank, seconds in found.items())
    return {device.rank: found.get(device.rank, work / device.speed) for device in cluster.devices}


def move_seconds(parameters: Iterable[ParameterHome], cluster: Cluster) -> float:
    """Return what it takes to bring parameters, and their moments, from their homes to where they are read."""
    moved: dict[tuple[int, int], float] = defaultdict(float)
    for one in parameters:
        _add(moved, _numbers(one.shape, one.home, one.read).gathered, (1 + MOMENTS) * one.itemsize)
    return max(_by_device(moved, cluster))


def _add(total: dict[K, float], entries: Mapping[K, float], itemsize: int) -> None:
    for key, number in entries.items():
        total[key] += number * itemsize


def _by_device(pairs: Pairs, cluster: Cluster) -> list[float]:
    """Return the seconds of some messages for each device: until all have travelled, and its copies of its own."""
    travelling = messages_cost([(*ends, num_bytes) for ends, num_bytes in pairs.items()], cluster)
    moved: dict[int, float] = defaultdict(float)
    for ends, num_bytes in pairs.items():
        for rank in ends:
            moved[rank] += num_bytes
    moves = TURN_MOVES / 2  # around a ring, every byte that arrives is one that leaves
    return [travelling + moves * moved[device.rank] * cluster.copy_seconds([device.rank]) for device in cluster.devices]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Entries: those that each rank owns, what travels from owners to readers, and of gradients to owners."""

    owned: Mapping[int, float]
    gathered: Pairs
    synced: Pairs


@lru_cache(maxsize=4096)
def _numbers(shape: tuple[int, ...], home: Annotation, read: Annotation | None) -> _Numbers:
    owned = {rank: math.prod(home.region(rank, shape).local_shape) for rank in home.ranks}
    gathered: Counter[tuple[int, int]] = Counter()
    synced: Counter[tuple[int, int]] = Counter()
    for part in finest_slices(Transition(home, read, shape)) if read is not None else ():
        ((owners,),) = part.owners
        first = next((owner for owner in owners if owner in part.receivers), owners[0])
        for reader in set(part.receivers) - {first}:
            synced[reader, first] += part.numel
        for owner in set(owners) - {first}:
            synced[first, owner] += part.numel
        for reader in set(part.receivers) - set(owners):
            gathered[first, reader] += part.numel
    return _Numbers(owned, gathered, synced)
