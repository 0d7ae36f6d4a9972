"""A step under a plan with a program, on paper: what `planner.simulate` does for other plans, for what a program runs.

All devices do a stage (the ops between two exchanges of activations) at once, the slowest setting the pace: forward in
order, backward in reverse, a third of the work and two. Parts are whole indices of what is cut. To a device's work come
what running an op takes besides, and moves of the parameters that it computes with. Every turn of an exchange is a
meeting of devices that compute.

Parameters that lie whole live in parts by speed (zero 1): they are gathered as a step begins, in buckets, and gradients
that come in summands are summed there, beside the backward, each bucket when all of its gradients are made. Those that
are made whole on each device need no sum. With zero 0 every device keeps them and updates all of them, and sums go
around twice. So a product that sends factors, like what all devices do alike, pays for its parameters too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import BUCKET_BYTES
from hetu_fx.planner.price.link_load import turn_traffic
from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD, OP_SECONDS, WEIGHT_MOVES
from hetu_fx.planner.price.step import TERMS
from hetu_fx.planner.price.step_end import TURN_MOVES, optimizer_seconds
from hetu_fx.planner.search.hap.op_program import HapStep, LayoutChange
from hetu_fx.planner.search.hap.prices import PricedCollective, round_shares
from hetu_fx.planner.search.hap.synthesised_program import HapResult
from hetu_fx.planner.search.hap.tensor_states import SHARED, ChangeKind, LayoutKind
from hetu_fx.planner.simulate.jobs import Jobs, Task
from hetu_fx.planner.simulate.simulation import Simulation, simulation
from hetu_fx.planner.values.exchanged_values import turn_seconds
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.planner.values.tensor_program import Tensor
from hetu_fx.plans.prediction import DeviceCost, Prediction
from hetu_fx.plans.schedule import Phase

Seconds = dict[int, float]
"""By device."""

_TURNS = {ChangeKind.ALL_REDUCE: 2}


@dataclass(frozen=True)
class _Stage:
    """Ops between two exchanges of activations.

    Attributes:
        work: seconds of each device, forward and backward.
        before, after: exchanges before its forward, and after its backward.
        sums: bytes of parameters that it is the first to read, whose gradients are summed.
    """

    work: Seconds
    before: tuple[PricedCollective, ...]
    after: tuple[PricedCollective, ...]
    sums: float


class PlayedStep:
    """A step of a program that runs."""

    def __init__(
        self, run: HapResult, tensors: Mapping[str, Tensor], costs: ProgramCosts, cluster: Cluster, zero: int
    ) -> None:
        """Add all its jobs.

        Args:
            run: what runs, on its devices, at its ratios.
            tensors: of its problem, by name.
            costs: of the program, as other plans are priced by: ops do their part of that work, which is more than HAP
                counts where gradients pass without any.
            cluster: of these devices, at least.
            zero: whether parameters that lie whole live in parts (1), or on every device (0).
        """
        self._run, self._tensors, self._costs, self._cluster, self._zero = run, tensors, costs, cluster, zero
        self._ranks, steps = run.ranks, run.program.steps
        self._homes = {name: home for step in steps for name, home in step.homes}
        changes = [change for step in steps for change in step.changes if change.is_parameter]
        brought = {change.tensor for change in changes if change.target.kind is not LayoutKind.SPLIT}
        lying = {name for name, home in self._homes.items() if home.kind is not LayoutKind.SPLIT}
        self._whole = brought | lying  # the parameters that devices compute with whole
        self._whole_bytes = math.fsum(tensors[name].bytes for name in self._whole)
        self._summed = {change.tensor for change in changes if change.target == SHARED}  # gradients come in summands
        self._more_work = self._work_of_costs()
        self._stages = tuple(map(self._stage, self._cut()))
        self._updates = self._update_seconds()
        self._jobs = Jobs(cluster)
        done = self._backward(self._forward(self._started()))
        for rank, seconds in self._updates.items():
            self._jobs.do(self._jobs.compute("optimizer", {rank: seconds}), "optimizer", done)

    def prediction(self) -> Prediction:
        """Return what the step takes, and the seconds and bytes of each device by term."""
        seconds = self._jobs.seconds()
        return Prediction(seconds, tuple(self._devices(seconds)), why=self._run.why)

    def simulation(self) -> Simulation:
        """Return the step with its timeline.

        Memory is what devices hold all the time: what an op holds while it runs is not known of programs.
        """
        held = {rank: self._held_bytes(position) for position, rank in enumerate(self._ranks)}
        return simulation("simulated step of a program", self._jobs, held, [self._ranks])

    def _started(self) -> list[int]:
        """Add gathers of parameters and what a step takes on hosts; return the jobs that devices wait for."""
        size = self._whole_bytes if self._zero else 0.0
        parts, jobs = max(1, math.ceil(size / BUCKET_BYTES)), self._jobs
        gathers = [jobs.do(self._travel("gather", size / parts), "gather", []) for _ in range(parts if size else 0)]
        hosts = {rank: self._cluster.device(rank).step_now for rank in self._ranks}
        started = [jobs.do(jobs.compute("host", {r: s}), "host", gathers) for r, s in hosts.items() if s]
        return started or gathers

    def _forward(self, after: list[int]) -> list[int]:
        """Add the forward of all stages after these jobs; return what comes after it waits for."""
        for number, stage in enumerate(self._stages):
            after = self._exchanged(stage.before, after)
            work = self._work(stage, Phase.FORWARD, 1 / FORWARD_AND_BACKWARD)
            after = [self._jobs.do(work, f"forward {number}", after)]
        return after

    def _backward(self, after: list[int]) -> list[int]:
        """Add the backward of all stages, and the sums of gradients beside it; return what updates wait for."""
        waits, ready = list[int](), 0.0
        for number, stage in reversed(list(enumerate(self._stages))):
            work = self._work(stage, Phase.BACKWARD, 1 - 1 / FORWARD_AND_BACKWARD)
            after = [self._jobs.do(work, f"backward {number}", after)]
            ready += stage.sums
            if ready > BUCKET_BYTES or (ready and not number):
                waits.append(self._jobs.do(self._travel("gradients", ready), f"gradients {number}", after))
                ready = 0.0
            after = self._exchanged(stage.after, after)
        return [*after, *waits]

    def _exchanged(self, transfers: Iterable[PricedCollective], after: list[int]) -> list[int]:
        """Add exchanges of activations, one after another."""
        for transfer in transfers:
            turns = _TURNS.get(transfer.change, 1)
            lost = min(turns * self._cluster.meeting_seconds(self._ranks), transfer.seconds(self._run.ratios))
            line = Line(lost, transfer.seconds(self._run.ratios) - lost)
            traffic = turn_traffic(self._ranks, transfer.bytes, turns, self._cluster)
            if transfer.change in (ChangeKind.SHIFT, ChangeKind.ALL_TO_ALL):
                traffic = ()  # it sends less than goes around for all of a tensor
            task = self._jobs.transfer("communication", line, traffic, self._ranks)
            after = [self._jobs.do(task, str(transfer), after)]
        return after

    def _work(self, stage: _Stage, phase: Phase, part: float) -> Task:
        slowest = max(stage.work.values())
        uses = {("compute", rank): own / slowest for rank, own in stage.work.items() if own} if slowest else {}
        return Task(phase, self._ranks, part * slowest, uses)

    def _travel(self, kind: str, num_bytes: float) -> Task:
        """Return the way of parameters to those that compute, or of gradients back, in buckets."""
        turns = 1 if self._zero else 2
        seconds = turns * turn_seconds(num_bytes, self._ranks, self._cluster)
        copies = num_bytes * TURN_MOVES * self._cluster.copy_seconds(self._ranks)
        fixed = turns * turn_seconds(0.0, self._ranks, self._cluster)
        traffic = turn_traffic(self._ranks, num_bytes, turns, self._cluster)
        return self._jobs.transfer(kind, Line(fixed, seconds - fixed + copies), traffic, self._ranks)

    def _cut(self) -> Iterator[list[HapStep]]:
        """Yield the ops of each stage."""
        piece: list[HapStep] = []
        for step in self._run.program.steps:
            if piece and (step.ends_stage or step.gathered):
                yield piece
                piece = []
            piece.append(step)
        yield piece

    def _stage(self, steps: Sequence[HapStep]) -> _Stage:
        changes = (change for step in steps for change in step.changes if _is_exchanged(change))
        moved = [transfer for change in changes for transfer in change.transfers]
        before = tuple(transfer for transfer in moved if not transfer.is_backward)
        after = tuple(transfer for transfer in moved if transfer.is_backward)
        sent = tuple(transfer for step in steps for transfer in step.gathered)
        sums = sum(self._tensors[name].bytes for step in steps for name, _ in step.homes if name in self._summed)
        return _Stage(self._seconds(steps), before, (*sent, *after), sums)

    def _seconds(self, steps: Sequence[HapStep]) -> Seconds:
        """Return each device's seconds of some ops, with what comes to their work."""
        found = dict.fromkeys(self._ranks, 0.0)
        for step in steps:
            for position, rank in enumerate(self._ranks):
                found[rank] += self._of_op(step, position) + self._besides(step, position)
        return found

    def _of_op(self, step: HapStep, position: int) -> float:
        form, speed = step.form, self._run.speeds[position]
        share = 0.0
        if form.cut is not None:
            share = round_shares(self._run.ratios[form.segment], form.units)[position] / form.units
        return self._more_work * (form.cut_flops * share + form.whole_flops) / speed

    def _work_of_costs(self) -> float:
        """Return how many times as much work the costs know as the ops of the program do."""
        whole, steps = self._costs.whole, self._run.program.steps
        per_byte = fmean(self._cluster.device(rank).flops_per_byte for rank in self._ranks)
        counted = FORWARD_AND_BACKWARD * self._costs.rows * (whole.flops + whole.traffic_bytes * per_byte)
        own = math.fsum(step.form.cut_flops + step.form.whole_flops for step in steps)
        return max(1.0, counted / own) if own else 1.0

    def _besides(self, step: HapStep, position: int) -> float:
        """Return what running an op takes besides, and moves of parameters that nothing has read before."""
        device = self._cluster.device(self._ranks[position])
        known = device.op_now
        of_one = OP_SECONDS * self._cluster.top_speed(device.kind) / device.speed if known is None else known
        ops = self._costs.whole.num_ops / len(self._run.program.steps)
        moved = sum(self._held(name, position) for name, _ in step.homes)
        return FORWARD_AND_BACKWARD * ops * of_one + moved * WEIGHT_MOVES * device.flops_per_byte / device.speed

    def _held(self, name: str, position: int) -> float:
        """Return the bytes of a parameter that a device computes with."""
        size, home = self._tensors[name].bytes, self._homes[name]
        return size if name in self._whole else size * self._run.ratios[home.segment][position]

    def _update_seconds(self) -> Seconds:
        """Return what each device's update takes."""
        found: dict[int, float] = defaultdict(float)
        for name in self._homes:
            for position, rank in enumerate(self._ranks):
                is_spread = name in self._whole and self._zero
                share = self._run.speeds[position] / sum(self._run.speeds) if is_spread else 1.0
                found[rank] += optimizer_seconds(self._held(name, position) * share, self._cluster.device(rank))
        return dict(found)

    def _held_bytes(self, position: int) -> int:
        return math.ceil(self._run.held.on_device(position, self._run.ratios))

    def _devices(self, seconds: float) -> Iterator[DeviceCost]:
        sums = sum(stage.sums for stage in self._stages)
        exchanges = math.fsum(
            transfer.seconds(self._run.ratios) for stage in self._stages for transfer in (*stage.before, *stage.after)
        )
        sync = self._travel("gradients", sums).alone_seconds if sums else 0.0
        gather = self._travel("gather", self._whole_bytes).alone_seconds if self._zero and self._whole else 0.0
        for position, rank in enumerate(self._ranks):
            host, work = self._cluster.device(rank).step_now, math.fsum(stage.work[rank] for stage in self._stages)
            busy = (host, work, exchanges, 0.0)
            ends = (sync, gather, self._updates.get(rank, 0.0))
            idle = max(0.0, seconds - math.fsum((*busy, *ends)))
            held = (("held", self._held_bytes(position)),)
            yield DeviceCost(rank, tuple(zip(TERMS, (*busy, idle, *ends), strict=True)), held)


def _is_exchanged(change: LayoutChange) -> bool:
    """Tell whether devices wait for a change where it stands: of activations, and of parameters cut anew."""
    return not change.is_parameter or change.target.kind is LayoutKind.SPLIT
