"""What a group of devices takes for a range of blocks, whether its devices are alike or not, and what each holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.fitting import least_blocks
from hetu_fx.planner.price.placement import BlockRange
from hetu_fx.planner.price.stage_seconds import device_lines, forward_lines, part_costs
from hetu_fx.planner.price.step_end import optimizer_seconds
from hetu_fx.planner.values.device_memory import in_flight
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Schedule, Stage


@dataclass(frozen=True, slots=True)
class ReplicaRules:
    """What holds for all replicas of a search; `memory` is usable bytes by rank."""

    schedule: Schedule
    zero: int
    micro_batches: tuple[int, ...]
    memory: dict[int, int]
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class StageRun:
    """How a stage is run: what is in flight, and over how many replicas states are spread."""

    micro_rows: int
    num_in_flight: int
    micro_batches: int
    num_replicas: int

    @classmethod
    def of(cls, stage: int, num_stages: int, rows: tuple[int, int], num_replicas: int, rules: ReplicaRules) -> StageRun:
        """Return how a stage of a pipeline is run; `rows` are those of a micro-batch, and how many of these."""
        micro_rows, count = rows
        return cls(micro_rows, in_flight(rules.schedule, stage, num_stages, count), count, num_replicas)


def _most_rows(room: int, piece: BlockRange, run: StageRun, zero: int) -> int:
    """Return the most rows of a micro-batch that fit a device, whatever rows `run` says."""
    copies = run.num_replicas * piece.stage.context
    return piece.most_rows(room, run.num_in_flight, run.micro_batches, zero, copies)


def _least_recompute(room: int, piece: BlockRange, run: StageRun, rules: ReplicaRules) -> int | None:
    """Return how few blocks have to be recomputed for a run to fit a device; None if it does not whatever is."""

    def fits(blocks: int) -> bool:
        return _most_rows(room, piece.recomputing(blocks) if blocks else piece, run, rules.zero) >= run.micro_rows

    if fits(0):
        return 0
    if not rules.recompute:
        return None
    start, stop, known = piece.start, piece.stop, piece.costs.known_recompute
    # but for one block they need no more recomputed: searches give stages one after the other
    fewer = (start, stop - 1) if not start or stop < piece.costs.num_blocks else (start + 1, stop)
    asked = run, rules.zero, room, piece.share, piece.group, piece.stage.context
    if (asked, start, stop) not in known:
        least = known.get((asked, *fewer), 0)
        known[asked, start, stop] = None if least is None else least_blocks(stop - start, fits, least)
    return known[asked, start, stop]


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """A group with a range of blocks: seconds of a micro-batch without hand-overs, and what its devices hold.

    `recompute_line` is one more forward of all its blocks; `holdings` are the bytes of memory that devices which differ
    may use, and what they hold;
    `update_seconds` is what the slowest device's optimizer step takes if it owns all that it holds; `host_seconds` is
    what a step takes on the slowest host; `parameter_bytes` is the most that a device holds.
    """

    seconds: Line
    recompute_line: Line
    holdings: tuple[tuple[int, BlockRange], ...]
    update_seconds: float
    host_seconds: float
    parameter_bytes: float

    def recomputing(self, blocks: int) -> StageEstimate:
        """Return the same of a stage whose devices hold less, as so many blocks are recomputed."""
        return replace(self, holdings=tuple((room, piece.recomputing(blocks)) for room, piece in self.holdings))

    def recomputed_line(self, blocks: int) -> Line:
        """Return the seconds of recomputing some blocks, as if all took the same."""
        _, piece = self.holdings[0]
        return self.recompute_line.times(blocks / (piece.stop - piece.start) if blocks else 0.0)

    def most_rows(self, run: StageRun, zero: int) -> int:
        """Return the most rows of a micro-batch that fit all devices, whatever rows `run` says."""
        return min(_most_rows(*holding, run, zero) for holding in self.holdings)

    def least_recompute(self, run: StageRun, rules: ReplicaRules) -> int | None:
        """Return how few blocks have to be recomputed for the run to fit; None if it does not whatever is."""
        counts = []
        for holding in self.holdings:
            least = _least_recompute(*holding, run, rules)
            if least is None:
                return None
            counts.append(least)
        return max(counts)

    def seconds_of(self, run: StageRun, rules: ReplicaRules, rows: int) -> float:
        """Return the seconds of `rows` rows with what has to be recomputed for a run; infinite where it cannot fit."""
        count = self.least_recompute(run, rules)
        return math.inf if count is None else self.seconds(rows) + self.recomputed_line(count)(rows)


def stage_estimate(
    stage: Stage, start: int, stop: int, costs: ProgramCosts, cluster: Cluster, memory: Mapping[int, int]
) -> StageEstimate:
    """Return what the blocks [start, stop) take on a stage, without what is handed over.

    Of devices with equal shares, that with the least memory stands for all.

    Args:
        stage: its devices, and how these share work; it recomputes nothing.
        start: first block.
        stop: after the last block.
        costs: of the program.
        cluster: has the stage's devices, and the fastest of their kinds, by which overheads are counted.
        memory: usable bytes by rank.
    """
    shares, again = stage.shares, stage.recomputing(stop - start)
    firsts = {share: shares.index(share) for share in dict.fromkeys(shares)}
    again_of = {share: costs.again(again, start, position) for share, position in firsts.items()}
    forwards = forward_lines(device_lines(stage, [again_of[share] for share in shares], cluster))
    room = {
        share: min(memory[r] for r, other in zip(stage.devices, shares, strict=True) if other == share)
        for share in firsts
    }
    pieces = {share: BlockRange(costs, stage, position, start, stop) for share, position in firsts.items()}
    holdings = tuple((room[share], piece) for share, piece in pieces.items())
    priced, devices = part_costs(stage, start, stop, costs, cluster), map(cluster.device, stage.devices)
    return StageEstimate(
        seconds=priced.slowest_compute + priced.tensor_parallel,
        recompute_line=reduce(Line.upper, forwards),
        holdings=holdings,
        update_seconds=max(optimizer_seconds(priced.parameter_bytes(i), one) for i, one in enumerate(devices)),
        host_seconds=max(priced.host),
        parameter_bytes=max(piece.parameter_bytes for _, piece in holdings),
    )
