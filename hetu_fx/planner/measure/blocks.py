"""Measure blocks of a captured model on the devices at hand: each distinct one, at several lengths and degrees."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import ProfileError
from hetu_fx.planner.measure.fit import (
    SHARES_OF_LENGTH,
    BlockSample,
    block_time,
    degrees_of,
    distinct_blocks,
    fastest_of,
    lengths_of,
    slowdown,
)
from hetu_fx.planner.measure.shards import BlockShard, shard_of, symbol_hints
from hetu_fx.planner.values.block_times import BlockTime
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.program.program import Program

SECONDS = 90.0
_REPEATS = 3  # runs of a shard at least, after one that warms up
_CELL_SECONDS = 0.5  # how long a shard is run for one length, if that is more often

Tell = Callable[[str, int, int], None]
"""Told what is measured now, how many measurements are done, and how many there are."""


def nobody(what: str, done: int, count: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Measuring:
    """How blocks are measured.

    Attributes:
        cluster: the devices at hand, as measured; device i is that of rank i.
        seconds: how long it may take, about; where that is too little for long sequences, shorter ones are timed.
        tell: told how far it has come.
    """

    cluster: Cluster
    seconds: float = SECONDS
    tell: Tell = field(default=nobody, compare=False)

    def measures(self, rank: int) -> bool:
        """Tell whether a rank measures: the fastest device of each kind does, the others wait."""
        device = self.cluster.device(rank)
        return fastest_of(device.kind, self.cluster).rank == rank


def with_times(profile: Profile, program: Program, rank: int, measuring: Measuring, place: torch.device) -> Profile:
    """Return the profile with times and alpha of this rank's kind of device, measured on `place`.

    Raises:
        ProfileError: the model has no sequences of any length, no repeated blocks, or they cannot be run apart.
    """
    _check(profile, program, place)
    kind = measuring.cluster.device(rank).kind
    samples = list(_Measurement(profile, program, measuring, rank, place).samples())
    times = [
        block_time(kind, found, profile.costs, profile.tokens_per_row, measuring.cluster)
        for degree in degrees_of(profile.costs.units)
        if (found := [sample for sample in samples if sample.tensor_parallel == degree])
    ]
    alpha = (slowdown(times, profile.tokens_per_row),) if len(times) > 1 else ()
    return replace(profile, times=tuple(times), alpha=alpha)


def joined(profiles: Sequence[Profile]) -> Profile:
    """Return the first profile with the times and alphas of all: they are of different kinds of devices."""
    times: tuple[BlockTime, ...] = tuple(time for profile in profiles for time in profile.times)
    alpha = tuple(slowdown for profile in profiles for slowdown in profile.alpha)
    return replace(profiles[0], times=times, alpha=alpha)


def _check(profile: Profile, program: Program, place: torch.device) -> None:
    reason = None
    if not profile.costs.num_blocks:
        reason = "the model has no repeated blocks"
    elif program.graph.batch_symbol is None:
        reason = "its captured graph is for a fixed number of rows"
    elif not symbol_hints(program):
        reason = "its captured graph has no sequences that could have other lengths"
    elif place.type == "meta":
        reason = "it is on the meta device, and blocks need one to run on (such as model.to_empty(device='cpu'))"
    if reason is not None:
        raise ProfileError(f"blocks cannot be measured: {reason}; profile it without measuring")


class _Measurement:
    """Runs every shard at every length."""

    def __init__(
        self, profile: Profile, program: Program, measuring: Measuring, rank: int, place: torch.device
    ) -> None:
        self._profile, self._program, self._place = profile, program, place
        self._measuring, self._rank = measuring, rank
        self._blocks = distinct_blocks(profile.costs)
        self._degrees = degrees_of(profile.costs.units)

    def samples(self) -> Iterator[BlockSample]:
        """Yield what was measured."""
        lengths = lengths_of(self._profile.tokens_per_row, self._estimate(), self._measuring.seconds)
        total, done = len(self._degrees) * len(self._blocks) * len(lengths), 0
        share = self._measuring.seconds / total
        for degree in self._degrees:
            for block, count in self._blocks:
                shard = shard_of(self._program, block, degree)
                for length in lengths:
                    self._measuring.tell(f"block {block} on {degree} x {length} tokens", done, total)
                    yield BlockSample(degree, length, *_timed(shard, length, self._place, share), count)
                    done += 1
        self._measuring.tell("done", total, total)

    def _estimate(self) -> float:
        """Return the seconds, by FLOPs, of all runs that are needed up to the longest sequence."""
        costs, speed = self._profile.costs, self._measuring.cluster.device(self._rank).speed
        flops = sum(costs.blocks[block].flops for block, _ in self._blocks) * len(self._degrees)
        return 3 * flops / speed * (_REPEATS + 2) * sum(SHARES_OF_LENGTH)


def _timed(shard: BlockShard, length: int, place: torch.device, budget: float) -> tuple[float, float]:
    """Return the median seconds forward and backward, and the bytes kept in between."""
    inputs = shard.inputs(length, place)
    kept = shard.kept_bytes(inputs)
    seconds_of(shard, inputs)
    seconds: list[float] = []
    while len(seconds) < _REPEATS or sum(seconds) < min(_CELL_SECONDS, budget / 2):
        seconds.append(seconds_of(shard, inputs))
    return statistics.median(seconds), float(kept)


def seconds_of(shard: BlockShard, inputs: Sequence[torch.Tensor]) -> float:
    """Run a shard forward and backward; return the seconds."""
    for tensor in inputs:
        tensor.grad = None
    _wait(inputs)
    start = time.perf_counter()
    shard.backward(shard.forward(inputs))
    _wait(inputs)
    return time.perf_counter() - start


def _wait(inputs: Sequence[torch.Tensor]) -> None:
    for device in {tensor.device for tensor in inputs if tensor.is_cuda}:
        torch.cuda.synchronize(device)
