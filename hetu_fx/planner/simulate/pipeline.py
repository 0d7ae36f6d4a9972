"""One pipeline on paper: its parts, how long each takes for a micro-batch, and what it holds meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.beside import seen_shares
from hetu_fx.planner.price.links import HandOver, Traffic, hand_over, turn_traffic
from hetu_fx.planner.price.stage import StageCosts, compute_lines, stage_costs
from hetu_fx.planner.values.footprint import StageFootprint
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.schedule import Phase


@dataclass(frozen=True, slots=True)
class PipelineLane:
    """A pipeline, and what each of its parts costs.

    `seen` says what share products do not hide of what a part's sums take, forward and backward.
    """

    pipeline: PartedPipeline
    costs: tuple[StageCosts, ...]
    program: ProgramCosts
    cluster: Cluster
    seen: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, plan: Plan, number: int, rows: int, program: ProgramCosts, cluster: Cluster) -> PipelineLane:
        """Return a pipeline of a plan, by its number, whose largest micro-batch has so many rows.

        Raises `PlanError` where it does not fit the program.
        """
        pipeline = PartedPipeline.of(plan.pipelines[number], program.num_blocks, plan.chunks)
        costs = stage_costs(pipeline, program, cluster)
        seen = tuple(seen_shares(one, max(1, rows), plan.schedule, cluster) for one in costs)
        return cls(pipeline, costs, program, cluster, seen)

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the ranks of all stages, in order."""
        return self.pipeline.pipeline.devices

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each stage."""
        return tuple(stage.devices for stage in self.pipeline.pipeline.stages)

    @property
    def sends_itself(self) -> bool:
        """Tell whether devices send by themselves, as far as kinds tell; a host does while it does something else."""
        return any(self.cluster.device(rank).kind != "cpu" for rank in self.devices)

    def compute(self, part: int, work: Phase, rows: int) -> dict[int, float]:
        """Return the seconds that each device of a part computes."""
        costs = self.costs[part]
        return dict(zip(costs.stage.devices, costs.compute_of(work, rows), strict=True))

    def reductions(self, part: int, work: Phase, rows: int) -> Line:
        """Return latency and seconds of the sums (gathers, in a ring) that a part's devices make of `rows` rows.

        Those of the backward are of gradients of inputs.
        """
        costs = self.costs[part]
        match work:
            case Phase.FORWARD:
                line = costs.sums
            case Phase.WEIGHT_GRADIENT:
                line = Line()
            case _:
                line = costs.returns
        return Line(line.fixed, line.slope * rows)

    def reduction_traffic(self, part: int, work: Phase, rows: int) -> Traffic:
        """Return what goes around for them: twice for a sum, once where the sequence is shared."""
        is_forward, found = work is Phase.FORWARD, self.costs[part].rounds
        sizes = [(one, one.forward if is_forward else one.backward) for one in found]
        traffic = (turn_traffic(one.ranks, size * rows, one.kind, self.cluster) for one, size in sizes)
        return tuple(itertools.chain.from_iterable(traffic))

    def seen_share(self, part: int, work: Phase) -> float:
        """Return what share of the seconds that their bytes take is not hidden beside products."""
        forward, backward = self.seen[part]
        return forward if work is Phase.FORWARD else backward

    def handed_bytes(self, part: int, rows: int) -> float:
        """Return the bytes that a part gets from the one before it for `rows` rows; none at the ends."""
        return self.program.boundary(self.pipeline.stops[part]) * rows

    def hand_over(self, source: int, part: int, rows: int) -> HandOver:
        """Return how a part gets what its neighbour has made of `rows` rows."""
        ends = self.pipeline.parts[source], self.pipeline.parts[part]
        return hand_over(*ends, self.handed_bytes(max(source, part), rows), self.cluster)

    def footprint(self, part: int, position: int) -> StageFootprint:
        """Return what a device of a part holds of micro-batches."""
        start, stop = self.pipeline.stops[part : part + 2]
        program = self.program.kept_by(self.costs[part].stage, start, position)
        return program.footprint(start, stop, self.costs[part].share(position))

    def weights(self, part: int, blocks: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """Return how a part's compute falls on ranges [start, stop) of its blocks, in proportion."""
        stage = self.pipeline.parts[part]
        program = self.program.on(stage)
        ranges = [compute_lines(stage, program.stage(start, stop), self.cluster) for start, stop in blocks]
        weights = [max(line.slope for line in lines) for lines in ranges]
        total = sum(weights)
        return tuple(weight / total if total else 1 / len(weights) for weight in weights)
