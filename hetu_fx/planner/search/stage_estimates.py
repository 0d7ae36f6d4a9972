"""What a group of devices takes for a range of blocks, whether its devices are alike or not, and what each holds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
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


@dataclass(frozen=True, slots=True)
class DeviceHolding:
    """What a device of a stage holds, and the bytes of memory that it may use."""

    memory: int
    piece: BlockRange

    def most_rows(self, run: StageRun, zero: int, recompute: int = 0) -> int:
        """Return the most rows of a micro-batch that fit, whatever rows `run` says."""
        piece = self.piece.recomputing(recompute) if recompute else self.piece
        copies = run.num_replicas * piece.stage.context
        return piece.most_rows(self.memory, run.num_in_flight, run.micro_batches, zero, copies)

    def least_recompute(self, run: StageRun, rules: ReplicaRules) -> int | None:
        """Return how few blocks have to be recomputed for the run to fit; None if it does not whatever is."""
        if self.most_rows(run, rules.zero) >= run.micro_rows:
            return 0
        if not rules.recompute:
            return None

        def fits(blocks: int) -> bool:
            return self.most_rows(run, rules.zero, blocks) >= run.micro_rows

        piece, known = self.piece, self.piece.costs.known_recompute
        key, fewer = (self._asked(run, rules, *blocks) for blocks in ((piece.start, piece.stop), self._fewer))
        if key not in known:
            least = known.get(fewer, 0)
            known[key] = None if least is None else least_blocks(piece.stop - piece.start, fits, least)
        return known[key]

    def _asked(self, run: StageRun, rules: ReplicaRules, start: int, stop: int) -> Hashable:
        """Return what the answer for these blocks is kept by."""
        return run, rules.zero, self.memory, start, stop, self.piece.share, self.piece.group, self.piece.stage.context

    @property
    def _fewer(self) -> tuple[int, int]:
        """Return the blocks but for one, which need no more recomputed: searches give stages one after the other."""
        start, stop = self.piece.start, self.piece.stop
        return (start, stop - 1) if not start or stop < self.piece.costs.num_blocks else (start + 1, stop)


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """A group with a range of blocks: seconds of a micro-batch without hand-overs, and what its devices hold.

    `recompute_line` is one more forward of all its blocks; `holdings` are those of devices that differ;
    `update_seconds` is what the slowest device's optimizer step takes if it owns all that it holds; `host_seconds` is
    what a step takes on the slowest host; `parameter_bytes` is the most that a device holds.
    """

    seconds: Line
    recompute_line: Line
    holdings: tuple[DeviceHolding, ...]
    update_seconds: float
    host_seconds: float
    parameter_bytes: float

    def recomputing(self, blocks: int) -> StageEstimate:
        """Return the same of a stage whose devices hold less, as so many blocks are recomputed."""
        held = (DeviceHolding(holding.memory, holding.piece.recomputing(blocks)) for holding in self.holdings)
        return replace(self, holdings=tuple(held))

    def recomputed_line(self, blocks: int) -> Line:
        """Return the seconds of recomputing some blocks, as if all took the same."""
        piece = self.holdings[0].piece
        return self.recompute_line.times(blocks / (piece.stop - piece.start) if blocks else 0.0)

    def most_rows(self, run: StageRun, zero: int) -> int:
        """Return the most rows of a micro-batch that fit all devices, whatever rows `run` says."""
        return min(holding.most_rows(run, zero) for holding in self.holdings)

    def least_recompute(self, run: StageRun, rules: ReplicaRules) -> int | None:
        """Return how few blocks have to be recomputed for the run to fit; None if it does not whatever is."""
        counts = []
        for holding in self.holdings:
            least = holding.least_recompute(run, rules)
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
    holdings = tuple(DeviceHolding(room[share], piece) for share, piece in pieces.items())
    priced, devices = part_costs(stage, start, stop, costs, cluster), map(cluster.device, stage.devices)
    return StageEstimate(
        seconds=priced.slowest_compute + priced.tensor_parallel,
        recompute_line=reduce(Line.upper, forwards),
        holdings=holdings,
        update_seconds=max(optimizer_seconds(priced.parameter_bytes(i), one) for i, one in enumerate(devices)),
        host_seconds=max(priced.host),
        parameter_bytes=max(holding.piece.parameter_bytes for holding in holdings),
    )
