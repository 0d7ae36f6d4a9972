"""What one step of a program costs, as far as it does not depend on devices.

A program is what stands before its repeated blocks, the blocks, and what stands after.

It is counted for rows of one length. Work and bytes of a row are polynomials of second degree in its tokens (attention
is the square), so three counted lengths tell every other one exactly. With fewer they are taken as proportional to
tokens, which leaves out the square.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add

from hetu_fx.base.once import once
from hetu_fx.errors import PlanError, ProfileError
from hetu_fx.planner.values.exchanged_values import (
    NO_ROW_SUMS,
    RowSums,
    TiedParameter,
    gradient_bytes,
    pending_gradient_bytes,
)
from hetu_fx.planner.values.footprint import PartMemory, ProgramMemory, StageFootprint
from hetu_fx.planner.values.line import Amount, Line
from hetu_fx.planner.values.part_costs import NO_COSTS, PartCosts
from hetu_fx.planner.values.state import UNSAID, ParameterState
from hetu_fx.plans.plan import Attention, Plan, Stage
from hetu_fx.plans.recomputed import RecomputedOps


@dataclass(frozen=True)
class ProgramCosts:
    """Costs of a step with `rows` rows in all.

    boundary_bytes[k] is what one row hands over from block k to k + 1. `units` is how many parts the class that tensor
    parallelism cuts has (key-value heads, say): a group's ratios are whole numbers that add up to it; 1 means that
    nothing can be cut. `memory` is what each part holds; None: what its activation_bytes say. `tied` are the parameters
    that several parts read; parts are numbered from 0, which stands before the blocks. `row_sums` are what replicas sum
    in the middle of a step. `gathered_work` is what every one of several replicas does of all rows, per row: of its own
    the parts count it. `state` is what stands beside parameters. `sequence_units` is by how many devices a sequence can
    be shared at most (its tokens), 1 where context parallel stages cannot run the program, `head_units` by how many
    attention can be shared by heads. `wide` are the costs for tensor parallel groups of more devices than `units`,
    whole multiples of it up to `wide.units`: `repeated_parts` of those is `units`, each of which several devices hold
    where nothing finer is cut. None where there are no such groups.
    """

    rows: int
    before: PartCosts
    blocks: tuple[PartCosts, ...]
    after: PartCosts
    boundary_bytes: tuple[float, ...] = ()
    units: int = 1
    memory: ProgramMemory | None = None
    tied: tuple[TiedParameter, ...] = ()
    row_sums: RowSums = NO_ROW_SUMS
    gathered_work: PartCosts = NO_COSTS
    state: ParameterState = UNSAID
    sequence_units: int = 1
    repeated_parts: int = 1
    wide: ProgramCosts | None = None
    head_units: int = 1

    def __post_init__(self) -> None:
        expected = max(0, len(self.blocks) - 1)
        if len(self.boundary_bytes) != expected:
            raise PlanError(
                f"program costs: {len(self.boundary_bytes)} boundaries for {len(self.blocks)} blocks\n"
                f"hint: give {expected}"
            )
        if min(self.rows, self.units, self.sequence_units) < 1:
            numbers = f"rows {self.rows}, units {self.units}, sequence_units {self.sequence_units}"
            raise PlanError(f"program costs: {numbers}\nhint: give 1 or more of each")
        if self.wide is not None and (self.wide.rows, self.wide.state) != (self.rows, self.state):
            object.__setattr__(self, "wide", replace(self.wide, rows=self.rows, state=self.state))
        count, last = len(self.parts), max((one.readers[-1] for one in self.tied), default=0)
        if self.memory is not None and len(self.memory.parts) != count:
            raise PlanError(
                f"program costs: memory has {len(self.memory.parts)} parts, the program {count}\n"
                f"hint: give one for each part"
            )
        if last >= count:
            raise PlanError(f"program costs: part {last} reads a tied parameter, but parts are 0 to {count - 1}")

    @property
    def parts(self) -> tuple[PartCosts, ...]:
        """Return all parts in order."""
        return (self.before, *self.blocks, self.after)

    @property
    def num_blocks(self) -> int:
        """Return the number of repeated blocks."""
        return len(self.blocks)

    @cached_property
    def is_uniform(self) -> bool:
        """Tell whether all blocks cost the same."""
        return len(set(self.blocks)) <= 1 and len(set(self.boundary_bytes)) <= 1

    @property
    def has_sequence(self) -> bool:
        """Tell whether there is a sequence that a tensor parallel group may share."""
        return self.whole.sequence_activation_bytes > 0

    @cached_property
    def in_sequence(self) -> ProgramCosts:
        """Return the costs for tensor parallel groups that share the sequence."""
        return replace(self, wide=None)._each(lambda part: part.in_sequence, lambda memory: memory.in_sequence)

    @cached_property
    def by_sequence(self) -> ProgramCosts:
        """Return the costs for context parallel groups."""
        gathered = [part.gathered_bytes for part in self.parts]
        whole = replace(self, tied=tuple(replace(one, split_bytes=0.0) for one in self.tied), wide=None)
        return whole._each(lambda part: part.by_sequence, lambda memory: memory.by_sequence(gathered))

    @cached_property
    def in_ring(self) -> ProgramCosts:
        """Return the costs for context parallel groups in which keys and values go round instead of being gathered."""
        return self._each(lambda part: part.in_ring, lambda memory: memory.in_ring)

    @cached_property
    def in_heads(self) -> ProgramCosts:
        """Return the costs for context parallel groups that exchange tokens for heads around attention."""
        return self._each(lambda part: part.in_heads, lambda memory: memory.in_heads)

    @once
    def narrowed(self, share: float) -> ProgramCosts:
        """Return the costs of a device that has `share` of what a tensor parallel group cuts, as all that there is."""
        tied = tuple(replace(one, bytes=one.at(share), split_bytes=0.0) for one in self.tied)
        whole = replace(self, tied=tied, repeated_parts=1, wide=None)
        gathered = share if self.repeated_parts == 1 else 1.0  # parts of keys and values are counted as all there is
        return whole._each(lambda part: part.narrowed(share, gathered), lambda memory: memory.narrowed(share))

    def _each(
        self, part: Callable[[PartCosts], PartCosts], memory: Callable[[ProgramMemory], ProgramMemory]
    ) -> ProgramCosts:
        """Return the program with all parts, and what they hold, changed."""
        before, *blocks, after = map(part, self.parts)
        held = None if self.memory is None else memory(self.memory)
        wide = None if self.wide is None else self.wide._each(part, memory)
        work = part(self.gathered_work)
        changed = {"before": before, "after": after, "memory": held, "wide": wide, "gathered_work": work}
        return replace(self, blocks=tuple(blocks), **changed)  # type: ignore[arg-type]

    def under(self, plan: Plan) -> ProgramCosts:
        """Return the costs as a plan asks for them."""
        if plan.sequence_parallel:
            return self.in_sequence
        return self.attending(plan.attention)

    @once
    def of_replica(self, rows: int) -> ProgramCosts:
        """Return the costs for one of several replicas, which has so many rows of its own.

        What it does of those of others too counts as work of its own, of the last part: such a program is not cut.
        """
        if not 0 < rows < self.rows or self.gathered_work == NO_COSTS:
            return self
        wide = None if self.wide is None else self.wide.of_replica(rows)
        return replace(self, after=self.after + self.gathered_work.times(self.rows / rows - 1), wide=wide)

    def attending(self, attention: Attention) -> ProgramCosts:
        """Return the costs for context parallel groups that attend so."""
        match attention:
            case "ring":
                return self.in_ring
            case "heads":
                return self.in_heads
            case _:
                return self

    def group_sizes(self, most: int) -> list[int]:
        """Return how many devices, up to `most`, a tensor parallel group with even shares may have."""
        sizes = [size for size in range(1, min(most, self.units) + 1) if self.units % size == 0]
        wide = range(2 * self.units, min(most, self.wide.units) + 1, self.units) if self.wide is not None else ()
        return [*sizes, *(size for size in wide if self.wide is not None and self.wide.units % size == 0)]

    def takes(self, size: int) -> bool:
        """Tell whether a tensor parallel group of so many devices, in even shares, can run the program."""
        return size in self.group_sizes(size)

    def for_group(self, size: int) -> ProgramCosts:
        """Return the costs for tensor parallel groups of so many devices."""
        return self if self.wide is None or size <= self.units else self.wide

    def of_groups(self, stage: Stage) -> ProgramCosts:
        """Return the costs for the tensor parallel groups of a stage."""
        return self.for_group(len(stage.devices) // stage.context)

    def on(self, stage: Stage, position: int = 0) -> ProgramCosts:
        """Return the costs for the way in which a stage's devices share work; in a grid, of a device by position."""
        own = self.of_groups(stage)
        if stage.is_grid:
            return own.narrowed(stage.shares[position][1]).by_sequence
        return own.by_sequence if stage.shares_sequence else own

    def kept_by(self, stage: Stage, start: int, position: int = 0) -> ProgramCosts:
        """Return the same, with what a stage with the blocks from `start` keeps of those that it recomputes."""
        return self.kept(stage, start, stage.recompute, stage.recompute_ops, position)

    def kept(
        self, stage: Stage, start: int, blocks: int, ops: RecomputedOps = "all", position: int = 0
    ) -> ProgramCosts:
        """Return the same for a stage that recomputes so many blocks, whatever it says itself."""
        shared = self.on(stage, position)
        if not blocks:
            return shared
        summed = tuple(block.reduced_bytes for block in self.of_groups(stage).blocks) if stage.is_grid else ()
        return shared._recomputing(start, start + blocks, (self._way(stage), ops), summed)

    @staticmethod
    def _way(stage: Stage) -> str:
        """Return how a stage's devices share work, as `footprint.RecomputeMemory` names it."""
        if stage.shares_sequence:
            return "grid" if stage.is_grid else "context"
        return "tensor" if len(stage.devices) > 1 else "alone"

    def again(self, stage: Stage, start: int, position: int = 0) -> PartCosts:
        """Return the costs of the blocks whose forward a stage with the blocks from `start` does once more."""
        blocks = self.on(stage, position).blocks[start : start + stage.recompute]
        return reduce(add, (block.again(stage.recompute_ops) for block in blocks), PartCosts())

    @once
    def _recomputing(
        self, start: int, stop: int, how: tuple[str, RecomputedOps], summed: tuple[float, ...]
    ) -> ProgramCosts:
        """Return the program with blocks that keep what they hand on, and what a group has sent.

        `how` is how devices share work, and which ops are computed again.
        `summed` are the bytes per row that each block of a grid sums over tensor parallel groups beside what the
        devices gather.
        """
        memory, (way, ops) = self._held, how
        parts, known = list(memory.parts), dict[tuple[int, Amount], PartMemory]()
        for block in range(start, stop):
            handed = self.boundary(block + 1) or self.boundary(block)
            ring = handed if self.blocks[block].ring_bytes else 0.0  # what attention makes, which it needs again
            sent = (self.blocks[block].reduced_bytes - self.blocks[block].ring_bytes) * (way != "alone")
            beside = ring + self.blocks[block].exchanged_bytes + (summed[block] if summed else 0.0)
            kept = Amount(0.0, handed + sent + beside, 0.0, handed * (way in ("context", "grid")) + beside)
            key = id(memory.parts[block + 1]), kept
            if key not in known:
                known[key] = parts[block + 1].recomputed(way, kept, ops)
            parts[block + 1] = known[key]
        return replace(self, memory=replace(memory, parts=tuple(parts)))

    @property
    def recompute_choices(self) -> tuple[RecomputedOps, ...]:
        """Return of which ops of a block it is known what is kept where these are computed again: the least first."""
        parts = self.memory.parts[1:-1] if self.memory is not None else ()
        known = any(piece.weights.per_row for part in parts for piece in part.again.alone)
        return ("pointwise", "attention", "all") if known else ("all",)

    @property
    def whole(self) -> PartCosts:
        """Return the costs of the whole program."""
        return self.stage(0, self.num_blocks)

    @once
    def stage(self, start: int, stop: int) -> PartCosts:
        """Return the costs of the blocks [start, stop), with what stands before and after them all."""
        first, last = self.numbers(start, stop)
        extra = [
            PartCosts(parameter_bytes=one.bytes, split_parameter_bytes=one.split_bytes)
            for one in self.tied
            if one.is_extra(first, last)
        ]
        return reduce(add, extra, self.between(start, stop))

    @once
    def between(self, start: int, stop: int) -> PartCosts:
        """Return the same with a parameter that several parts read counted for the first of all only."""
        first, last = self.numbers(start, stop)
        sums = self._sums.setdefault(first, [PartCosts()])
        for part in self.parts[first + len(sums) - 1 : last]:
            sums.append(sums[-1] + part)
        return sums[last - first]

    @cached_property
    def _sums(self) -> dict[int, list[PartCosts]]:
        """Return, for each part with which some begin, the costs of none, one, two and so on, as far as worked out."""
        return {}

    def alike(self, start: int, stop: int) -> tuple[int, int]:
        """Return blocks that cost the same by themselves, which are the same for all such where no blocks differ."""
        uniform = self.is_uniform and (self.wide is None or self.wide.is_uniform)
        return (1, 1 + stop - start) if uniform and 0 < start and stop < self.num_blocks else (start, stop)

    def numbers(self, start: int, stop: int) -> tuple[int, int]:
        """Return the numbers of the parts of a stage with the blocks [start, stop): the first, and after the last."""
        return (0 if start == 0 else start + 1), (stop + 2 if stop == self.num_blocks else stop + 1)

    def shared(self, start: int, stop: int) -> tuple[TiedParameter, ...]:
        """Return the parameters that a stage with the blocks [start, stop) reads, and other stages too."""
        first, last = self.numbers(start, stop)
        return tuple(one for one in self.tied if one.is_shared(first, last))

    def boundary(self, block: int) -> float:
        """Return the bytes per row handed over to block `block`; none at the ends."""
        return self.boundary_bytes[block - 1] if 0 < block < self.num_blocks else 0.0

    @once
    def footprint(
        self, start: int, stop: int, share: float, going: Callable[[float], float] | None = None
    ) -> StageFootprint:
        """Return what the blocks [start, stop), with what stands before and after them all, hold of micro-batches.

        `going` is what gradients hold that go as they come, of so many bytes.
        """
        first, last = self.numbers(start, stop)
        memory = self._held
        before = memory.everywhere.line(share) + Line(slope=self.boundary(start))
        counted = [part.parameter_bytes_at(share) for part in self.parts[first:last]]
        size = self.state.gradient_share
        gradients = [size * count for count in gradient_bytes(counted, self.tied, first, share)]
        waiting = [size * count for count in pending_gradient_bytes(self.tied, first, last - first, share)]
        return StageFootprint.of(memory.parts[first:last], gradients, share, before, waiting, going)

    def unit_bytes(self, share: float) -> tuple[float, ...]:
        """Return the bytes of what is gathered at once unit by unit: each part's, or eighths of what has no blocks."""
        if not self.blocks:
            return (self.whole.parameter_bytes_at(share) / PARTS,) * PARTS
        return tuple(part.parameter_bytes_at(share) for part in self.parts)

    @cached_property
    def _held(self) -> ProgramMemory:
        """Return what each part holds, as far as is known."""
        return self.memory or _assumed(self.parts)

    @cached_property
    def known_recompute(self) -> dict[object, int | None]:
        """What has been worked out of blocks to recompute."""
        return {}


def _assumed(parts: tuple[PartCosts, ...]) -> ProgramMemory:
    """Return what parts hold if nothing more is held while they run than they keep."""
    kept = [
        Amount(0.0, part.activation_bytes, 0.0, part.split_activation_bytes, 0.0, part.sequence_activation_bytes)
        for part in parts
    ]
    known = {amount: PartMemory(amount, amount) for amount in dict.fromkeys(kept)}
    return ProgramMemory(tuple([known[amount] for amount in kept]))


PARTS = 8
"""Into how many units a program without blocks is cut, about."""

ENOUGH = 3
"""So many lengths determine a polynomial of second degree."""

_WHOLE = ("flops", "attention_flops", "traffic_bytes", "activation_bytes")
_SHARED = ("traffic_bytes", "activation_bytes")
_MOVED = (
    *("reduced_bytes", "returned_bytes", "gathered_bytes", "ring_bytes", "heads_bytes", "exchanged_bytes"),
    *("summed_flops", "summed_bytes", "beside_flops", "beside_bytes"),
)


def costs_for_length(by_length: Mapping[int, ProgramCosts], length: int) -> ProgramCosts:
    """Return the costs for rows of `length` tokens. Raises `ProfileError` if none are known for any length."""
    if length in by_length:
        return by_length[length]
    weights = length_weights(by_length, length)
    return _combined([by_length[one] for one in weights], [*weights.values()])


def length_weights(known: Collection[int], length: int) -> dict[int, float]:
    """Return how what is known of some lengths adds up to what rows of another take, by the length.

    Raises `ProfileError` if none are known.
    """
    if not known:
        raise ProfileError("the profile does not say what length of rows it is for\nhint: give tokens_per_row")
    if length in known:
        return {length: 1.0}
    if len(known) < ENOUGH:
        nearest = min(known, key=lambda one: (abs(one - length), one))
        return {nearest: length / nearest}
    first, *_, last = lengths = sorted(known)
    chosen = (first, lengths[len(lengths) // 2], last)
    return {one: _weight(one, chosen, length) for one in chosen}


def _weight(one: int, nodes: Sequence[int], at: int) -> float:
    """Return Lagrange's weight of a node for the value at another place."""
    result = 1.0
    for other in nodes:
        result *= (at - other) / (one - other) if other != one else 1.0
    return result


def _combined(programs: Sequence[ProgramCosts], weights: Sequence[float]) -> ProgramCosts:
    """Return the weighted sum of what a row costs; what does not depend on rows is taken from the first."""
    wide = [program.wide for program in programs if program.wide is not None]
    blocks = zip(*(program.blocks for program in programs), strict=True)
    edges = zip(*(program.boundary_bytes for program in programs), strict=True)
    return replace(
        programs[0],
        before=_part([program.before for program in programs], weights),
        blocks=tuple(_part(parts, weights) for parts in blocks),
        after=_part([program.after for program in programs], weights),
        gathered_work=_part([program.gathered_work for program in programs], weights),
        boundary_bytes=tuple(_sum(sizes, weights) for sizes in edges),
        memory=_memory(programs, weights),
        wide=_combined(wide, weights) if len(wide) == len(programs) else None,
    )


def _memory(programs: Sequence[ProgramCosts], weights: Sequence[float]) -> ProgramMemory | None:
    """Return what parts hold; None where that is not known of all lengths."""
    known = [program.memory for program in programs if program.memory is not None]
    return ProgramMemory.combined(known, weights) if len(known) == len(programs) else None


def _part(parts: Sequence[PartCosts], weights: Sequence[float]) -> PartCosts:
    def of(name: str) -> float:
        return _sum([getattr(part, name) for part in parts], weights)

    values = {name: of(name) for name in (*_MOVED, *_WHOLE)}
    # rounding may lift a part above the whole
    values |= {f"split_{name}": min(values[name], of(f"split_{name}")) for name in _WHOLE}
    rest = {name: values[name] - values[f"split_{name}"] for name in _SHARED}
    values |= {f"sequence_{name}": min(rest[name], of(f"sequence_{name}")) for name in _SHARED}
    return replace(parts[0], **values)  # type: ignore[arg-type]


def _sum(values: Sequence[float], weights: Sequence[float]) -> float:
    return max(0.0, sum(value * weight for value, weight in zip(values, weights, strict=True)))
