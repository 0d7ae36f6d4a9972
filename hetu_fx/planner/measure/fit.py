"""From seconds of shards of blocks to what a profile says of a kind of device: curves by degree, and alpha."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.cluster.paces import Pace
from hetu_fx.errors import PlanError, ProfileError
from hetu_fx.planner.dispatch.scheme_costs import FitQuality, fit_times
from hetu_fx.planner.price.stage_seconds import compute_lines, tensor_parallel_lines
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


def timed_degrees(units: int) -> tuple[int, ...]:
    """Return the tensor parallel degrees that are timed: powers of two that cut `units` evenly."""
    return tuple(degree for degree in (1, 2, 4, MOST_DEGREES) if units % degree == 0)


def timed_lengths(longest: int, seconds: float, budget: float) -> tuple[int, ...]:
    """Return the lengths to time, shorter ones where timing all up to `longest` once takes `seconds`, over `budget`.

    Raises `ProfileError` where a sequence is too short for a curve.
    """
    most = longest if seconds <= budget else int(longest * budget / seconds)
    lengths = tuple(sorted({int(most * share) for share in SHARES_OF_LENGTH} - {0}))
    if len(lengths) < len(SHARES_OF_LENGTH):
        raise ProfileError(
            f"sequences of up to {most} tokens can be timed, which are too short for a curve\n"
            f"hint: give a batch with rows of {len(SHARES_OF_LENGTH)} tokens at least, or more seconds"
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
    mean, sums = found.fit, _communication(degree, costs, cluster, fastest_of_kind(kind, cluster))
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


def _fitted(where: str, samples: Sequence[tuple[int, float]]) -> FitQuality:
    try:
        return fit_times(samples)
    except PlanError as problem:
        said, *_ = str(problem).splitlines()
        raise ProfileError(
            f"{where}: no curve lies near the measured (tokens, seconds) {samples}: {said}\n"
            f"hint: measure longer sequences, on a machine that does nothing else"
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
    healthy = _alike(device, degree, cluster)
    sums, returns = tensor_parallel_lines(Stage(healthy.ranks), _all_blocks(costs), healthy)
    total, count = sums + returns, costs.num_blocks
    return Line(total.fixed / count, total.slope / count)


def _alike(device: Device, count: int, cluster: Cluster) -> Cluster:
    """Return so many healthy devices like this one, on one node of the cluster, priced by its figures alone."""
    alike = tuple(replace(device, rank=rank, rate=1.0) for rank in range(count))
    return replace(cluster, devices=alike, paces=())


def _all_blocks(costs: ProgramCosts) -> PartCosts:
    return reduce(add, costs.blocks)


def fastest_of_kind(kind: str, cluster: Cluster) -> Device:
    """Return the fastest healthy device of a kind, the first of equal ones: what times of the kind hold for."""
    return max((d for d in cluster.devices if d.kind == kind), key=lambda d: (d.flops_per_second, -d.rank))


def counted_seconds(costs: ProgramCosts, rank: int, cluster: Cluster, rows: int) -> float:
    """Return what all blocks take a device forward and backward for so many rows, as the cluster has it."""
    return compute_lines(Stage((rank,)), _all_blocks(costs), cluster)[0](rows)


def slowdown(times: Sequence[BlockTime], length: int) -> Slowdown:
    """Return Malleus' alpha for sequences of `length` tokens, from one kind's times by degree."""
    largest = max(times, key=lambda time: time.tensor_parallel).seconds(length)
    factors = {time.tensor_parallel: time.seconds(length) / largest for time in times}
    return Slowdown(times[0].kind, factors, source="measured")


def calibrate_from_profile(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster as fast as its devices are on the profile's blocks, for kinds with known times.

    Rows of blocks are then predicted to take as long as the times say, on groups of every size that was timed, and on
    those in between as on a line. All devices of a kind keep their speeds relative to its fastest, which was timed.
    What is not a block is taken to be as much faster or slower than by the cluster's figures as blocks are.
    """
    if not profile.tokens_per_row or not profile.costs.num_blocks:
        return cluster
    found, paces = cluster.devices, []
    for kind in dict.fromkeys(device.kind for device in cluster.devices):
        known = profile.block_times(kind)
        if known:
            fastest = fastest_of_kind(kind, cluster)
            speedup = 1 / _KindOnBlocks(fastest, profile, cluster).pace(known[min(known)]).work
            found = tuple(_faster(device, speedup) if device.kind == kind else device for device in found)
            own = _KindOnBlocks(_faster(fastest, speedup), profile, cluster)
            paces += [own.pace(known[degree]) for degree in sorted(known)]
    kept = tuple(pace for pace in cluster.paces if pace.kind not in {one.kind for one in paces})
    return replace(cluster, devices=found, paces=(*kept, *paces))


def _faster(device: Device, times: float) -> Device:
    return device.at(device.flops_per_second * times)


LEAST = 0.1
"""Of a measured time so much is compute at least, as links may have been others, and of that so much grows with rows.

No speed can be told from overheads alone.
"""


@dataclass(frozen=True, slots=True)
class _KindOnBlocks:
    """A healthy device of a kind, the program, and the links of the cluster."""

    device: Device
    profile: Profile
    cluster: Cluster

    def pace(self, known: BlockTime) -> Pace:
        """Return what a group takes for all blocks and one row, over what is counted."""
        degree, costs = known.tensor_parallel, self.profile.costs
        counted, sums = self._counted(degree), _communication(degree, costs, self.cluster, self.device)
        measured = Line(known.c, known.seconds(self.profile.tokens_per_row) - known.c)
        whole = max(measured(1) - sums(1), LEAST * measured(1)) * costs.num_blocks
        fixed = min(max(0.0, (measured.fixed - sums.fixed) * costs.num_blocks), (1 - LEAST) * whole)
        if not counted.fixed or not counted.slope:
            ratio = whole / counted(1) if counted(1) else 1.0
            return Pace(known.kind, degree, float(ratio), float(ratio))
        return Pace(known.kind, degree, float((whole - fixed) / counted.slope), float(fixed / counted.fixed))

    def _counted(self, degree: int) -> Line:
        """Return the compute of all blocks on a group, as the figures of the kind have it."""
        alike = _alike(self.device, degree, self.cluster)
        return compute_lines(Stage(alike.ranks), _all_blocks(self.profile.costs), alike)[0]
