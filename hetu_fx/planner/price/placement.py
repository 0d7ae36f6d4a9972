"""What each device of a plan is given to hold: its part of its stage, and its part of what replicas share.

A parameter that several stages read (a tied one) counts with the first of them, and the sum of its gradients too: where
it is large, the first stage of a pipeline is charged too much and the last too little.

A device whose stage is in chunks holds so many micro-batches of each, which differ from one to another: the moments are
those of `device_memory`; those amid micro-batches are found by going through the schedule.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

from hetu_fx.base.once import once_per_object
from hetu_fx.planner.values.device_memory import (
    HeldShard,
    Instant,
    Terms,
    at_ends,
    in_flight,
    instants,
    most_rows,
    peak,
)
from hetu_fx.planner.values.exchanged_values import TiedParameter
from hetu_fx.planner.values.footprint import StageFootprint
from hetu_fx.planner.values.line import ZERO, Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.parts import DeviceDeal, PartedPipeline
from hetu_fx.plans.plan import Plan, Schedule, Stage, pipeline_rows
from hetu_fx.plans.recomputed import RecomputedOps
from hetu_fx.plans.schedule import Order, Phase, stage_orders

T = TypeVar("T")

HOME_SHARES = 1000
"""Into how many parts homes are shared out by memory, so that plans are exact."""


@dataclass(frozen=True, slots=True)
class Homes:
    """Where the states of what a device reads are kept.

    Attributes:
        zero: 0 keeps the states wherever they are read, 1 every element of them once; under 2 gradients go home as they
            come, and under 3 parameters are gathered unit by unit, too (`Plan.zero_in_effect`).
        num_copies: how many devices read the same part of what a stage splits, near enough where pipelines differ.
        split: the device's share of the states of its shards of split parameters.
        whole: its share of the states of those that the whole group reads.
        tied: its share of the states of the whole of those that other stages of its pipeline read too.
    """

    zero: int
    num_copies: int
    split: float = 1.0
    whole: float = 1.0
    tied: float = 1.0

    @classmethod
    def even(cls, zero: int, num_copies: int, group: int) -> Homes:
        """Return states that are spread evenly over all that read them, tied ones as if no other stage did."""
        return cls(zero, num_copies, 1 / num_copies, 1 / num_copies / group, 1 / num_copies / group)


def _place(piece: BlockRange) -> tuple[ProgramCosts, tuple[int, int, float, int]]:
    """Return what keeps answers about a piece, and what tells it from other pieces of the program."""
    return piece.costs, (piece.start, piece.stop, piece.share, piece.group)


@dataclass(frozen=True, slots=True)
class BlockRange:
    """The blocks [start, stop) of a program on a stage's device, by position.

    `costs` are those of the program for the way in which the stage's devices share work, and for what it recomputes,
    `share` is the device's of what a group of `group` devices splits.
    """

    program: ProgramCosts
    stage: Stage
    position: int
    start: int
    stop: int
    costs: ProgramCosts = field(init=False)
    share: float = field(init=False)
    group: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", self.program.kept_by(self.stage, self.start, self.position))
        object.__setattr__(self, "share", self.stage.work_shares[self.position])
        object.__setattr__(self, "group", len(self.stage.context_groups))

    def recomputing(self, blocks: int, ops: RecomputedOps = "all") -> BlockRange:
        """Return the same with so many blocks, its first ones, recomputed."""
        return replace(self, stage=self.stage.recomputing(blocks, ops))

    @property
    def parameter_bytes(self) -> float:
        """Return the bytes of parameters that the piece reads."""
        return self.costs.stage(self.start, self.stop).parameter_bytes_at(self.share)

    def shard(self, homes: Homes) -> HeldShard:
        """Return what its device holds."""
        shared = self.costs.shared(self.start, self.stop)
        tied = sum(one.at(self.share) for one in shared)
        tied_split = self.share * sum(one.split_bytes for one in shared)
        split = self.costs.stage(self.start, self.stop).split_parameter_bytes * self.share - tied_split
        common = self.parameter_bytes - split - tied
        repeated = self.costs.stage(self.start, self.stop).repeated_parameter_bytes * (self.costs.repeated_parts - 1)
        copied = self.parameter_bytes if homes.num_copies > 1 else common * (self.group > 1) + tied
        owned = split * homes.split + (common + repeated) * homes.whole + sum(one.bytes for one in shared) * homes.tied
        lets_go, units = homes.zero >= 2, self.costs.unit_bytes(self.share) if homes.zero == 3 else ()
        buffers = sum(max(units[first::2], default=0.0) for first in (0, 1))  # neighbours are there together
        copies = min(copied, buffers) if units else copied
        shard = HeldShard(
            parameters=self.parameter_bytes,
            owned=owned if homes.zero else self.parameter_bytes,
            copied=copies if homes.zero else 0.0,
            synced=copied if homes.zero or homes.num_copies > 1 else tied,
            footprint=self.costs.footprint(self.start, self.stop, self.share),
            handed=self.costs.boundary(self.start) + self.costs.boundary(self.stop),
            state=self.costs.state,
            lets_go=lets_go,
            unit=max(units, default=0.0),
        )
        if not lets_go:
            return shard
        return replace(shard, footprint=self.costs.footprint(self.start, self.stop, self.share, shard.going))

    @once_per_object(_place)
    def most_rows(self, limit: int, num_in_flight: int, micro_batches: int, zero: int, num_replicas: int) -> int:
        """Return the most rows of a micro-batch that a device can hold, if states are spread evenly over readers."""
        return most_rows(limit, self.shard(Homes.even(zero, num_replicas, self.group)), num_in_flight, micro_batches)

    @once_per_object(_place)
    def peak(self, rows: int, num_in_flight: int, micro_batches: int, homes: Homes) -> Terms:
        """Return what its device holds at its peak, by term."""
        return peak(instants(self.shard(homes), num_in_flight, micro_batches), rows)


@dataclass(frozen=True, slots=True)
class PlacedDevice:
    """A device of a plan: its pipeline and part of it by number, what it is given, and where the states of that are.

    It runs `micro_batches` of up to `rows` rows, of which it keeps `num_in_flight` where its stage holds one part. A
    device of a stage in chunks is placed once for each of them; `deal` says which parts these are.
    """

    rank: int
    pipeline: int
    part: int
    deal: DeviceDeal
    piece: BlockRange
    homes: Homes
    rows: int
    micro_batches: int
    num_in_flight: int

    @property
    def stage(self) -> int:
        """Return the number of its stage."""
        return self.deal.stage(self.part)


def device_bytes(
    plan: Plan, costs: ProgramCosts, speeds: Mapping[int, float], pipelines: Container[int] | None = None
) -> dict[int, Terms]:
    """Return the bytes of every device of a plan, or of these pipelines, by term, at its peak.

    States are spread by `speeds`. Raises `PlanError` for a plan that does not fit the program.
    """
    places = by_rank(placed_devices(plan, costs, speeds, pipelines))
    keys = {rank: alike_key(held) for rank, held in places.items()}
    return _found_once(keys, lambda rank: peak_terms(places[rank], plan.schedule))


def _found_once(keys: Mapping[int, Hashable], find: Callable[[int], T]) -> dict[int, T]:
    """Return what is found of each rank; of those that have equal keys the first one is asked."""
    known: dict[Hashable, T] = {}
    for rank, key in keys.items():
        if key not in known:
            known[key] = find(rank)
    return {rank: known[key] for rank, key in keys.items()}


def alike_key(places: Sequence[PlacedDevice]) -> Hashable:
    """Return what devices of a plan have in common that hold the same in all of their places."""
    pieces = ((id(p.piece.costs), p.piece.start, p.piece.stop, p.piece.share, p.piece.group) for p in places)
    runs = ((p.part, p.deal, p.homes, p.rows, p.micro_batches, p.num_in_flight) for p in places)
    return tuple(pieces), tuple(runs)


def by_rank(places: Iterator[PlacedDevice]) -> dict[int, list[PlacedDevice]]:
    """Return the places of each device: one for each part that it holds."""
    found: dict[int, list[PlacedDevice]] = {}
    for place in places:
        found.setdefault(place.rank, []).append(place)
    return found


def peak_terms(places: Sequence[PlacedDevice], schedule: Schedule) -> Terms:
    """Return what a device holds at its peak, by term, in all of its places."""
    first = places[0]
    if len(places) == 1:
        return first.piece.peak(first.rows, first.num_in_flight, first.micro_batches, first.homes)
    order = stage_orders(schedule, first.deal.num_stages, first.micro_batches, first.deal.chunks)[first.stage]
    shards = [place.piece.shard(place.homes) for place in places]
    return peak(chunk_instants(shards, order, first.micro_batches), first.rows)


def homes_by_memory(plan: Plan, costs: ProgramCosts, limits: Mapping[int, int]) -> Plan:
    """Return a plan with shares of homes in proportion to what each device has room for besides all else it holds.

    `limits` are bytes by rank. So no device owns more than fits, if all of them can own all together; where none has
    room the plan is returned as it is. Rows stay as they are.
    """
    equal = dict.fromkeys(plan.devices, 1.0)
    places = by_rank(placed_devices(replace(plan, homes=()), costs, equal))
    keys = {rank: (alike_key(held), limits[rank]) for rank, held in places.items()}
    rooms = _found_once(keys, lambda rank: _room(places[rank], plan.schedule, limits[rank]))
    most = max(rooms.values())
    if not plan.zero or not most or not (min(rooms.values()) or plan.is_data_parallel):  # where others own the rest
        return plan
    found = (rooms.get(rank, 0.0) for rank in range(max(plan.devices) + 1))
    return replace(plan, homes=tuple(math.ceil(HOME_SHARES * room / most) for room in found))


def _room(places: Sequence[PlacedDevice], schedule: Schedule, limit: int) -> float:
    """Return the bytes of the most parameters that a device can own of those that it reads."""

    def owning(parts: int) -> list[PlacedDevice]:
        own = parts / HOME_SHARES
        return [replace(one, homes=replace(one.homes, split=own, whole=own, tied=own)) for one in places]

    def exceeds(parts: int) -> bool:
        return sum(count for _, count in peak_terms(owning(parts), schedule)) > limit

    most = bisect_left(range(HOME_SHARES + 1), True, key=exceeds) - 1
    return sum(one.piece.shard(one.homes).owned for one in owning(most)) if most > 0 else 0.0


def device_shards(plan: Plan, costs: ProgramCosts, speeds: Mapping[int, float]) -> dict[int, HeldShard]:
    """Return what every device of a plan is given to hold; states are spread by `speeds`."""
    places = by_rank(placed_devices(plan, costs, speeds))
    return {rank: join_shards([place.piece.shard(place.homes) for place in found]) for rank, found in places.items()}


def placed_devices(
    plan: Plan, costs: ProgramCosts, speeds: Mapping[int, float], pipelines: Container[int] | None = None
) -> Iterator[PlacedDevice]:
    """Yield every device of a plan, or of these pipelines, with what it is given to hold.

    States are spread by the plan's shares of homes, or else by `speeds`.
    """
    asked, dealt, zero = costs.under(plan), plan.parts(costs.num_blocks), plan.zero_in_effect
    rows, speeds = pipeline_rows(costs.rows, plan), plan.home_weights(speeds)
    readers, tied_speed = _readers(dealt, speeds), _tied_speed(dealt, asked, speeds)
    chosen = (pair for pair in enumerate(dealt) if pipelines is None or pair[0] in pipelines)
    parts = ((i, pipeline.deal, *part) for i, pipeline in chosen for part in enumerate(_with_ranges(pipeline)))
    for number, deal, index, (stage, (start, stop)) in parts:
        holders = readers[start]
        tied = tied_speed if asked.shared(start, stop) else holders.speed
        group = len(stage.context_groups)
        count = max(1, min(plan.pipelines[number].micro_batches, rows[number]))
        kept = in_flight(plan.schedule, deal.stage(index), deal.num_stages, count)
        for position, rank in enumerate(stage.devices):
            share, own = stage.shares[position][1], speeds[rank]
            split = min(1.0, own / (holders.columns[position % group] if holders.columns else holders.speed * share))
            homes = Homes(
                zero=zero,
                num_copies=len(plan.pipelines) * stage.context,
                split=split,
                # In a grid nearly all weights are split: all count as if they were.
                whole=split if stage.is_grid else own / holders.speed,
                tied=split if stage.is_grid else own / tied,
            )
            held = BlockRange(asked, stage, position, start, stop)
            yield PlacedDevice(rank, number, index, deal, held, homes, -(-rows[number] // count), count, kept)


@dataclass(frozen=True, slots=True)
class _Holders:
    """Those that hold a block: the speed of all, and of those with each part of its weights if they split alike.

    Then the holders of a shard own it together. Else all own parts of the whole, in proportion to their speeds.
    """

    speed: float
    columns: tuple[float, ...] = ()

    @classmethod
    def of(cls, stages: Sequence[Stage], speeds: Mapping[int, float]) -> _Holders:
        whole = _speed(stages, speeds)
        if len({tensor for stage in stages for _, tensor in [stage.axes]}) > 1:
            return cls(whole)
        columns = zip(*(stage.context_groups for stage in stages), strict=True)
        return cls(whole, tuple(sum(speeds[rank] for ranks in column for rank in ranks) for column in columns))


def _with_ranges(pipeline: PartedPipeline) -> Iterator[tuple[Stage, tuple[int, int]]]:
    return zip(pipeline.parts, pipeline.ranges, strict=True)


def _readers(pipelines: Sequence[PartedPipeline], speeds: Mapping[int, float]) -> dict[int, _Holders]:
    """Return for every block with which a part begins those that hold it.

    A part without blocks begins where the next one does, and counts as a holder of that block where it is the last.
    """
    found: dict[int, _Holders] = {}
    for block in {start for pipeline in pipelines for start in pipeline.stops[:-1]}:
        found[block] = _Holders.of(block_holders(block, pipelines), speeds)
    return found


def _tied_speed(pipelines: Sequence[PartedPipeline], costs: ProgramCosts, speeds: Mapping[int, float]) -> float:
    """Return the speed of all that read parameters which several parts of a pipeline read."""
    pairs = ((len(pipeline.parts) == 1, *one) for pipeline in pipelines for one in _with_ranges(pipeline))
    return _speed([part for is_alone, part, blocks in pairs if is_alone or costs.shared(*blocks)], speeds)


def _speed(stages: Sequence[Stage], speeds: Mapping[int, float]) -> float:
    return sum(speeds[rank] for rank in dict.fromkeys(rank for stage in stages for rank in stage.devices))


def block_holders(block: int, pipelines: Sequence[PartedPipeline]) -> list[Stage]:
    """Return the part of each pipeline that holds a block; the last one for what stands after all."""
    return [one.parts[min(bisect_right(one.stops, block), len(one.parts)) - 1] for one in pipelines]


def tied_holders(costs: ProgramCosts, pipeline: PartedPipeline) -> tuple[tuple[TiedParameter, tuple[Stage, ...]], ...]:
    """Return each parameter that several parts of a pipeline read, with these."""
    pairs = [(part, costs.numbers(*blocks)) for part, blocks in _with_ranges(pipeline)]
    found = [(one, tuple(part for part, numbers in pairs if one.within(*numbers))) for one in costs.tied]
    return tuple((one, held) for one, held in found if len(held) > 1)


def join_shards(chunks: Sequence[HeldShard]) -> HeldShard:
    """Return what lasts of all chunks together; of several there is no one footprint."""
    if len(chunks) == 1:
        return chunks[0]
    return HeldShard(
        parameters=sum(one.parameters for one in chunks),
        owned=sum(one.owned for one in chunks),
        copied=sum(one.copied for one in chunks),
        synced=sum(one.synced for one in chunks),
        footprint=StageFootprint(ZERO, (), (), (), max(one.footprint.largest for one in chunks)),
        handed=sum(one.handed for one in chunks),
        state=chunks[0].state,
    )


def chunk_instants(chunks: Sequence[HeldShard], order: Order, micro_batches: int) -> Iterator[Instant]:
    """Yield what a device holds that runs an order of actions, of so many micro-batches of each chunk."""
    whole, passages = join_shards(chunks), _passages(order, len(chunks))
    most = [max(one.kept[chunk] + (one.chunk == chunk) for one in passages) for chunk in range(len(chunks))]
    sent = sum(min(micro_batches, count + 1) * one.handed for count, one in zip(most, chunks, strict=True))
    yield from at_ends(whole, sent)
    yield from itertools.chain.from_iterable(_passing(one, whole, chunks, sent) for one in passages)


@dataclass(frozen=True, slots=True)
class _Passage:
    """What is held when a micro-batch passes a chunk.

    Attributes:
        phase: in which it passes.
        chunk: that it passes.
        kept: how many other micro-batches each chunk keeps.
        gradients: of which chunks gradients have been made before.
    """

    phase: Phase
    chunk: int
    kept: tuple[int, ...]
    gradients: tuple[bool, ...]


@lru_cache(maxsize=512)
def _passages(order: Order, num_chunks: int) -> tuple[_Passage, ...]:
    """Return the passages of an order that are unlike each other."""
    kept, made, found = [0] * num_chunks, [False] * num_chunks, dict[_Passage, None]()
    for action in order:
        chunk, phase = action.chunk, action.phase
        kept[chunk] -= phase is not Phase.FORWARD
        found[_Passage(phase, chunk, tuple(kept), tuple(made))] = None
        kept[chunk] += phase in (Phase.FORWARD, Phase.INPUT_GRADIENT)
        made[chunk] |= phase in (Phase.BACKWARD, Phase.WEIGHT_GRADIENT)
    return tuple(found)


def _passing(passage: _Passage, whole: HeldShard, chunks: Sequence[HeldShard], sent: float) -> Iterator[Instant]:
    """Yield what is held during a passage."""
    lines = _lines(chunks[passage.chunk], passage.phase, is_first=not passage.gradients[passage.chunk])
    gradients = sum(one.gradients for one, is_made in zip(chunks, passage.gradients, strict=True) if is_made)
    pairs = zip(passage.kept, chunks, strict=True)
    below = sum((one.footprint.kept.times(count) for count, one in pairs), ZERO)
    for line in lines:
        yield Instant(str(passage.phase), whole, {"gradients": gradients}, line + below, sent)


def _lines(chunk: HeldShard, phase: Phase, *, is_first: bool) -> Sequence[Line]:
    """Return what is held of a micro-batch that passes a chunk, and of the gradients that it is the first to make.

    Of one whose weights' gradients wait all is kept, as in a stage that is whole.
    """
    footprint = chunk.footprint
    match phase:
        case Phase.FORWARD:
            return footprint.forward
        case Phase.BACKWARD:
            return footprint.backward if is_first else footprint.later
        case Phase.INPUT_GRADIENT:
            return footprint.later
        case Phase.WEIGHT_GRADIENT:
            return (footprint.kept + Line(chunk.gradients if is_first else 0.0),)
