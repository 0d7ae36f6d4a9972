"""From seconds of shards of blocks to what a profile says of a kind of device: curves by degree, and alpha."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.errors import PlanError, ProfileError
from hetu_fx.planner.dispatch.strategy import Fitted, fit_times
from hetu_fx.planner.price.stage import compute_lines, tensor_parallel_lines
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import BlockTime, Profile, Slowdown
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Stage

MOST_DEGREES = 8
SHARES_OF_LENGTH = (0.25, 0.5, 0.75, 1.0)
"""Lengths that are timed, of the longest: a curve of three constants needs three, and one more to be judged."""


@dataclass(frozen=True, slots=True)
class BlockSample:
    """One device's part of one block, for one sequence: seconds forward and backward without communication.

    `count` is how many blocks are like this one, `kept_bytes` what the device keeps of them for the backward.
    """

    tensor_parallel: int
    length: int
    seconds: float
    kept_bytes: float
    count: int = 1


def distinct_blocks(costs: ProgramCosts) -> tuple[tuple[int, int], ...]:
    """Return (index of one, how many there are) of each kind of block; of equal ones that in the middle."""
    alike: dict[PartCosts, list[int]] = {}
    for index, block in enumerate(costs.blocks):
        alike.setdefault(block, []).append(index)
    return tuple((found[len(found) // 2], len(found)) for found in alike.values())


def degrees_of(units: int) -> tuple[int, ...]:
    """Return the tensor parallel degrees that are timed: powers of two that cut `units` evenly."""
    return tuple(degree for degree in (1, 2, 4, MOST_DEGREES) if units % degree == 0)


def lengths_of(longest: int, seconds: float, budget: float) -> tuple[int, ...]:
    """Return the lengths to time, shorter ones where timing all up to `longest` once takes `seconds`, over `budget`.

    Raises `ProfileError` where a sequence is too short for a curve.
    """
    most = longest if seconds <= budget else int(longest * budget / seconds)
    lengths = tuple(sorted({int(most * share) for share in SHARES_OF_LENGTH} - {0}))
    if len(lengths) < len(SHARES_OF_LENGTH):
        raise ProfileError(
            f"sequences of up to {most} tokens can be timed, which are too short for a curve; give a batch with rows "
            f"of {len(SHARES_OF_LENGTH)} tokens at least, or more seconds"
        )
    return lengths


def block_time(
    kind: str, samples: Sequence[BlockSample], costs: ProgramCosts, length: int, cluster: Cluster
) -> BlockTime:
    """Return the curve of a block on a group of one degree: the mean over blocks, and communication as it is priced.

    Args:
        kind: of device.
        samples: of one degree.
        costs: of the program, for rows of `length` tokens.
        length: tokens.
        cluster: whose links and meetings the group has; its fastest device of the kind was timed.

    Raises `ProfileError` where longer sequences do not take longer.
    """
    degree = samples[0].tensor_parallel
    found = _fitted(f"a block on {degree} x {kind!r}", _mean(samples))
    mean, sums = found.fit, _communication(degree, costs, cluster, fastest_of(kind, cluster))
    longest = max(sample.length for sample in samples)
    kept = sum(s.kept_bytes * s.count for s in samples if s.length == longest)
    return BlockTime(
        kind,
        degree,
        a=mean.a,
        b=mean.b + sums.slope / length,
        c=mean.c + sums.fixed,
        bytes_per_token=kept / costs.num_blocks / longest,
        r_squared=found.r_squared,
        source="measured",
    )


def _fitted(where: str, samples: Sequence[tuple[int, float]]) -> Fitted:
    try:
        return fit_times(samples)
    except PlanError as problem:
        raise ProfileError(
            f"{where}: no curve lies near the measured (tokens, seconds) {samples}: {problem}; measure longer "
            f"sequences, on a machine that does nothing else"
        ) from None


def _mean(samples: Iterable[BlockSample]) -> list[tuple[int, float]]:
    """Return (length, seconds) of the mean block."""
    by_length: dict[int, list[BlockSample]] = {}
    for sample in samples:
        by_length.setdefault(sample.length, []).append(sample)
    return [
        (length, math.fsum(s.seconds * s.count for s in found) / sum(s.count for s in found))
        for length, found in by_length.items()
    ]


def _communication(degree: int, costs: ProgramCosts, cluster: Cluster, device: Device) -> Line:
    """Return the seconds that a group of devices like this one, on one node, communicates for the mean block."""
    alike = tuple(replace(device, rank=rank, node="0", rate=1.0) for rank in range(degree))
    healthy = Cluster(alike, cluster.intra, cluster.inter)
    sums, returns = tensor_parallel_lines(Stage(healthy.ranks), _all_blocks(costs), healthy)
    total, count = sums + returns, costs.num_blocks
    return Line(total.fixed / count, total.slope / count)


def _all_blocks(costs: ProgramCosts) -> PartCosts:
    return reduce(add, costs.blocks)


def fastest_of(kind: str, cluster: Cluster) -> Device:
    """Return the fastest healthy device of a kind, the first of equal ones: what times of the kind hold for."""
    return max((d for d in cluster.devices if d.kind == kind), key=lambda d: (d.flops_per_second, -d.rank))


def slowdown(times: Sequence[BlockTime], length: int) -> Slowdown:
    """Return Malleus' alpha for sequences of `length` tokens, from one kind's times by degree."""
    largest = max(times, key=lambda time: time.tensor_parallel).seconds(length)
    factors = {time.tensor_parallel: time.seconds(length) / largest for time in times}
    return Slowdown(times[0].kind, factors, source="measured")


def calibrated(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster with the speeds that its devices have on the profile's blocks, for kinds with known times.

    A kind's fastest device gets the speed by which a row of the profile's blocks is predicted to take as long as the
    times say; its other devices keep their speeds relative to it.
    """
    speeds: dict[int, float] = {}
    for kind in dict.fromkeys(device.kind for device in cluster.devices):
        known = profile.block_times(kind).get(1)
        if known is not None and profile.tokens_per_row and profile.costs.num_blocks:
            ratio = _speed_ratio(known, profile, fastest_of(kind, cluster))
            speeds |= {d.rank: d.flops_per_second * ratio for d in cluster.devices if d.kind == kind}
    return cluster.with_speeds(speeds)


def _speed_ratio(known: BlockTime, profile: Profile, device: Device) -> float:
    """Return how many times as fast as by its FLOPs per second a device runs the profile's blocks; 1 for no work.

    What the costs add for each op, whatever the speed, is taken off the times, but no more than half of these.
    """
    healthy, blocks = Cluster.on_paper([device.flops_per_second]), _all_blocks(profile.costs)
    pair = (blocks, PartCosts(num_ops=blocks.num_ops))
    row, overhead = (compute_lines(Stage((0,)), parts, healthy)[0](1) for parts in pair)
    measured = profile.costs.num_blocks * known.seconds(profile.tokens_per_row)
    return (row - overhead) / max(measured - overhead, measured / 2) or 1.0
