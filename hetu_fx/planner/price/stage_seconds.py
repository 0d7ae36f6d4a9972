"""Seconds of the stages of a pipeline for one micro-batch, as lines of its rows, and of the pipeline.

Stage s of a pipeline takes l_s(x) = a_s + b_s x seconds for forward and backward of a micro-batch of x rows:

    compute        3 x flops / speed + 3 x traffic / memory's speed + 3 x what ops take besides,         (1)
                   the speed being that of products in the stage's dtype,
                   and the parameters moved WEIGHT_MOVES times, whatever the rows are;
                   at the pace of the kind, where blocks were timed on it;
                   a third of that once more for blocks that are recomputed
    tensor parallel  the forward's all-reduces and the backward's, and the time lost to meet for each    (2)
                   or, context parallel, gathers of keys and values, and as many reduce-scatters        (2')
    hand-over      the activation to the next stage, the gradient to the one before, and a meeting for   (3)
                   each round of messages (`price.links`)

Every turn around a ring of devices that compute is a meeting: an all-reduce is two, a gather or a reduce-scatter one.
A group that shares the sequence makes two turns around the ring too: a reduce-scatter and an all-gather.

A pipeline of m micro-batches takes sum_s l_s(x) + (m - 1) max_s l_s(x) at most, x being the rows of the  (4)
largest, which is what searches look ahead by; what its schedule takes says `price.pipeline`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, pairwise
from operator import add

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.cluster.timed import SIZES
from hetu_fx.comm_ops.plans.cost import cheapest_ring_cost
from hetu_fx.planner.price.link_load import hand_over_line, resource_loads, turn_traffic
from hetu_fx.planner.values.exchanged_values import turn_seconds
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.plan import Stage
from hetu_fx.plans.schedule import Phase

FORWARD_AND_BACKWARD = 3  # a product's backward is two products, one for each operand
OP_SECONDS = 1.5e-5  # what running an op takes besides its work, on the fastest device of a kind that nobody measured
WEIGHT_MOVES = 6  # forward and backward read a parameter; its gradient is written, and added to that of earlier rows


def forward_lines(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the forward's part of whole lines: what recomputed blocks take again, as what is sent is kept."""
    return tuple(Line(n.fixed / FORWARD_AND_BACKWARD, n.slope / FORWARD_AND_BACKWARD) for n in lines)


def compute_lines(stage: Stage, parts: PartCosts, cluster: Cluster) -> tuple[Line, ...]:
    """Return (1) of each device of a stage that is no grid."""
    return device_lines(stage, (parts,) * len(stage.devices), cluster)


def device_lines(stage: Stage, parts: Sequence[PartCosts], cluster: Cluster) -> tuple[Line, ...]:
    """Return (1) of each device of a stage, of the part that each has."""
    return tuple(_compute_line(*one, cluster) for one in _working(stage, parts, cluster))


def _working(stage: Stage, parts: Sequence[PartCosts], cluster: Cluster) -> Iterator[tuple[Device, float, PartCosts]]:
    """Yield each device of a stage as fast as it is there, its share and its part."""
    devices = (cluster.computing(rank, stage.dtype) for rank in stage.devices)
    return zip(devices, stage.work_shares, parts, strict=True)


def _compute_line(device: Device, share: float, parts: PartCosts, cluster: Cluster) -> Line:
    known = device.op_now
    of_one = OP_SECONDS * _behind(device, cluster) if known is None else known
    overhead = parts.num_ops * of_one
    work = parts.flops_at(share) + parts.traffic_bytes_at(share) * device.flops_per_byte
    weights = parts.parameter_bytes_at(share) * WEIGHT_MOVES * device.flops_per_byte / device.speed
    pace, rest = cluster.pace(device.kind, share)
    return Line(rest * (FORWARD_AND_BACKWARD * overhead + weights), pace * FORWARD_AND_BACKWARD * work / device.speed)


def _behind(device: Device, cluster: Cluster) -> float:
    """Return how many times as long a device takes as the fastest of its kind, whatever dtypes they compute in."""
    return cluster.top_speed(device.kind) / cluster.device(device.rank).speed


def _later_line(device: Device, share: float, parts: PartCosts, cluster: Cluster) -> Line:
    """Return what of (1) the gradients of weights take that may be made later: as much as the products' forward."""
    pace, _ = cluster.pace(device.kind, share)
    return Line(0.0, pace * parts.weight_flops_at(share) / device.speed)


def tensor_parallel_lines(stage: Stage, parts: PartCosts, cluster: Cluster) -> tuple[Line, Line]:
    """Return (2) of the forward and of the backward, of a stage that is no grid."""
    return _round_lines(tuple(_rounds_of(stage, parts, (parts,))), cluster)


def _round_lines(rounds: Sequence[GroupRounds], cluster: Cluster) -> tuple[Line, Line]:
    """Return (2) and (2') of the forward and of the backward: of each kind and axis the slowest group."""
    forward, backward = Line(), Line()
    for kind, axis in dict.fromkeys((one.kind, one.axis) for one in rounds):
        groups = [one for one in rounds if (one.kind, one.axis) == (kind, axis)]
        lines = [_round_line(one, one.num_forward, one.forward, cluster) for one in groups]
        returns = [_round_line(one, one.num_backward, one.backward, cluster) for one in groups]
        forward = forward + _side_by_side(lines, [(one.ranks, one.forward) for one in groups], kind, cluster)
        backward = backward + _side_by_side(returns, [(one.ranks, one.backward) for one in groups], kind, cluster)
    return forward, backward


def _side_by_side(
    lines: Sequence[Line], sent: Sequence[tuple[tuple[int, ...], float]], turns: int, cluster: Cluster
) -> Line:
    """Return the seconds of groups that go round at the same time, by their lines alone and what each sends per row."""
    fixed, slope = reduce(Line.upper, lines)
    if all(len({cluster.node_of(rank) for rank in ranks}) == 1 for ranks, _ in sent):
        return Line(fixed, slope)  # each has links of its own
    messages = (turn_traffic(ranks, size, turns, cluster) for ranks, size in sent)
    loads = resource_loads(tuple(chain.from_iterable(messages)), cluster)
    return Line(fixed, max(slope, *(load for (name, _), load in loads.items() if name != "compute")))


def _round_line(one: GroupRounds, count: int, num_bytes: float, cluster: Cluster) -> Line:
    """Return the seconds of one direction.

    Rows of a micro-batch go round together: where messages were timed, by what the longest of them take, not by what
    one as short as a row does, most of which is latency.
    """
    turns, of_sum = one.kind, one.kind == SUM
    is_timed = cluster.turn_seconds(num_bytes, one.ranks, of_sum=of_sum) is not None
    size = max(num_bytes, SIZES[-1]) if is_timed else num_bytes
    empty, full = (cheapest_ring_cost(each, one.ranks, cluster, of_sum=of_sum) for each in (0.0, size))
    slope = turns * (full - empty) * num_bytes / size if size else 0.0
    return Line(count * turns * turn_seconds(0.0, one.ranks, cluster, of_sum=of_sum), slope)


SUM, GATHER = 2, 1
"""Turns around the ring of a sum over a group, and of a gather or a reduce-scatter."""


@dataclass(frozen=True, slots=True)
class GroupRounds:
    """Messages that a group of devices sends round; groups of one `kind` along one axis do so at the same time.

    Attributes:
        kind: of turns, SUM or GATHER.
        ranks: the group.
        forward, backward: bytes per row that go round, of all devices.
        num_forward, num_backward: in how many messages.
        axis: of a stage's devices; sums over a larger group than there are parts go along two, one after the other.
    """

    kind: int
    ranks: tuple[int, ...]
    forward: float
    backward: float
    num_forward: int
    num_backward: int
    axis: int = 0

    @classmethod
    def of(cls, kind: int, ranks: tuple[int, ...], parts: PartCosts, share: float = 1.0, axis: int = 0) -> GroupRounds:
        """Return what a group sends round that has `share` of each row."""
        counts = parts.num_reductions, parts.num_returns
        return cls(kind, ranks, parts.reduced_bytes * share, parts.returned_bytes * share, *counts, axis)


def _rounds_of(stage: Stage, whole: PartCosts, by_device: Sequence[PartCosts], parts: int = 1) -> Iterator[GroupRounds]:
    """Yield what goes round in a stage.

    Args:
        stage: its devices.
        whole: the costs of its part of the program for a tensor parallel group.
        by_device: those of each device for the way in which the devices share work.
        parts: of what several devices of a tensor parallel group hold the same part of; 1: there is no such thing.
    """
    if not stage.is_grid:
        if stage.shares_sequence:
            yield GroupRounds.of(GATHER, stage.devices, by_device[0])
            yield from _exchanges(stage.devices, by_device[0])
        else:
            yield from _sums(stage.devices, by_device[0], parts)
        return
    for ranks, own in zip(stage.context_groups, by_device, strict=False):
        yield GroupRounds.of(GATHER, ranks, own)
    size = len(stage.tensor_groups[0])
    for ranks, (context, _) in zip(stage.tensor_groups, stage.shares[::size], strict=True):
        yield from _sums(ranks, whole, parts, context)


def _exchanges(ranks: tuple[int, ...], costs: PartCosts) -> Iterator[GroupRounds]:
    """Yield what a group exchanges that shares attention by heads: of each device's part all but its own part."""
    sent, count = costs.exchanged_bytes / len(ranks), costs.num_exchanges
    if count:
        yield GroupRounds(GATHER, ranks, sent, sent, count, count, axis=1)


def _sums(ranks: tuple[int, ...], costs: PartCosts, parts: int, share: float = 1.0) -> Iterator[GroupRounds]:
    """Yield what a tensor parallel group sums: among those that have the same part, then among those that have all."""
    if parts == 1:
        yield GroupRounds.of(SUM, ranks, costs, share)
        return
    each = len(ranks) // parts
    yield from (GroupRounds.of(SUM, ranks[i : i + each], costs, share) for i in range(0, len(ranks), each))
    yield from (GroupRounds.of(SUM, ranks[i::each], costs, share, axis=1) for i in range(each))


@dataclass(frozen=True, slots=True)
class StageCosts:
    """A stage on its devices: seconds per micro-batch by term, and what it holds.

    `by_device` are the costs of its part of the program for each device, which differ in a grid alone; `rounds` is what
    the devices send each other; `host` is what each device's host takes before its first micro-batch; `again` is what
    `compute` has of forwards that are done once more in the backward, of each device, `later` what it has of gradients
    of weights that may wait; `repeated_parts` are those of its parameters of which several devices hold the same one.
    """

    stage: Stage
    by_device: tuple[PartCosts, ...]
    rounds: tuple[GroupRounds, ...]
    host: tuple[float, ...]
    compute: tuple[Line, ...]
    sums: Line
    returns: Line
    to_next: Line
    to_previous: Line
    again: tuple[Line, ...]
    later: tuple[Line, ...]
    repeated_parts: int = 1

    @property
    def parts(self) -> PartCosts:
        """Return the costs of its part of the program, for the first device."""
        return self.by_device[0]

    @property
    def slowest_compute(self) -> Line:
        """Return a line that no device's compute is above."""
        return reduce(Line.upper, self.compute)

    @property
    def tensor_parallel(self) -> Line:
        """Return (2): the sums of the forward and those of the backward."""
        return self.sums + self.returns

    @property
    def hand_over(self) -> Line:
        """Return (3): both messages of a micro-batch."""
        return self.to_next + self.to_previous

    def seconds_of(self, phase: Phase, rows: int) -> float:
        """Return the seconds of a phase of a micro-batch of so many rows, without what it hands over."""
        sums = {1: self.sums, 0: Line(), -1: self.returns}[phase.direction]
        return max(self.compute_of(phase, rows)) + sums(rows)

    def compute_of(self, phase: Phase, rows: int) -> tuple[float, ...]:
        """Return the seconds that each device computes in a phase of a micro-batch of so many rows."""
        lines = zip(self.compute, self.again, self.later, strict=True)
        return tuple([_part_of(phase, whole(rows), again(rows), later(rows)) for whole, again, later in lines])

    @property
    def seconds(self) -> Line:
        """Return l_s, forward and backward of one micro-batch."""
        return self.slowest_compute + self.tensor_parallel + self.hand_over

    def repeating(self, index: int) -> tuple[int, ...]:
        """Return the devices that hold the same part of such parameters as the stage's index-th device."""
        return self.stage.repeating(self.stage.devices[index], self.repeated_parts)

    def share(self, index: int) -> float:
        """Return the share of the stage's index-th device in what its costs cut."""
        return self.stage.work_shares[index]

    def parameter_bytes(self, index: int) -> float:
        """Return the parameter bytes that the stage's index-th device holds."""
        return self.by_device[index].parameter_bytes_at(self.share(index))


def _part_of(phase: Phase, whole: float, again: float, later: float) -> float:
    """Return what a phase has of the seconds that a device computes, of which some are forwards once more."""
    forward = (whole - again) / FORWARD_AND_BACKWARD
    match phase:
        case Phase.FORWARD:
            return forward
        case Phase.BACKWARD:
            return whole - forward
        case Phase.INPUT_GRADIENT:
            return whole - forward - later
        case Phase.WEIGHT_GRADIENT:
            return later


def pipeline_seconds(lines: Sequence[Line], rows: int, micro_batches: int) -> float:
    """Return (4) for `rows` rows in up to `micro_batches` micro-batches (no more than there are rows)."""
    if rows == 0:
        return 0.0
    count = min(micro_batches, rows)
    times = [line(math.ceil(rows / count)) for line in lines]
    return math.fsum(times) + (count - 1) * max(times)


_NO_HAND_OVER = Line(), Line()


def stage_costs(
    pipeline: PartedPipeline, costs: ProgramCosts, cluster: Cluster, rows: int = 1
) -> tuple[StageCosts, ...]:
    """Return the costs of every part of a pipeline.

    Hand-overs are sent in the way that is best for micro-batches of so many rows.
    """
    edges = [_NO_HAND_OVER, *_hand_overs(pipeline, costs, cluster, rows), _NO_HAND_OVER]
    sent = ((after[0], before[1]) for before, after in pairwise(edges))
    triples = zip(pipeline.parts, pipeline.ranges, sent, strict=True)
    return tuple(part_costs(stage, *blocks, costs, cluster, handed) for stage, blocks, handed in triples)


def _hand_overs(
    pipeline: PartedPipeline, costs: ProgramCosts, cluster: Cluster, rows: int
) -> Iterator[tuple[Line, Line]]:
    """Yield the seconds of a hand-over between parts that follow each other: to the later one, and back."""
    for (stage, other), block in zip(pairwise(pipeline.parts), pipeline.stops[1:], strict=False):
        there, back = ((*ends, costs.boundary(block), cluster, rows) for ends in ((stage, other), (other, stage)))
        yield hand_over_line(*there), hand_over_line(*back)


def part_costs(
    stage: Stage,
    start: int,
    stop: int,
    costs: ProgramCosts,
    cluster: Cluster,
    handed: tuple[Line, Line] = _NO_HAND_OVER,
) -> StageCosts:
    """Return what the blocks [start, stop) take on a stage, with what it hands over to the next one and back."""
    positions = range(len(stage.devices))
    parts = tuple(costs.on(stage, i).stage(start, stop) for i in positions)
    repeated = [costs.again(stage, start, i) for i in positions]
    again = forward_lines(device_lines(stage, repeated, cluster))
    compute = tuple(map(add, device_lines(stage, parts, cluster), again))
    group = costs.of_groups(stage)
    rounds = tuple(_rounds_of(stage, group.stage(start, stop), parts, group.repeated_parts))
    sent = *_round_lines(rounds, cluster), *handed
    host = tuple(cluster.device(rank).step_now for rank in stage.devices)
    later = tuple(_later_line(*one, cluster) for one in _working(stage, parts, cluster))
    return StageCosts(stage, parts, rounds, host, compute, *sent, again, later, group.repeated_parts)
