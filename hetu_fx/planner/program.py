"""What one step of a program costs, part by part, as far as it does not depend on devices.

A program is what stands before its repeated blocks, the blocks, and what stands after. Quantities that grow
with the batch are given per row. `split_...` is how much of a quantity a tensor parallel group cuts in
parts; the rest is done, or held, by every device of the group.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from operator import add, attrgetter

from hetu_fx.errors import PlanError
from hetu_fx.plans import Plan

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class PartCosts:
    """Costs of one part, forward only where it is work.

    flops, traffic_bytes (memory moved by ops that are not products), activation_bytes (kept for the
    backward), reduced_bytes (all-reduced in the forward by a tensor parallel group, in num_reductions
    messages), returned_bytes (all-reduced in the backward, in num_returns) and gathered_bytes (of keys and values,
    gathered by a context parallel group in num_gathers) are per row. `sequence_...` is what a tensor parallel
    group cuts besides if it shares the sequence.
    """

    flops: float = 0.0
    split_flops: float = 0.0
    traffic_bytes: float = 0.0
    split_traffic_bytes: float = 0.0
    activation_bytes: float = 0.0
    split_activation_bytes: float = 0.0
    parameter_bytes: float = 0.0
    split_parameter_bytes: float = 0.0
    reduced_bytes: float = 0.0
    num_reductions: int = 0
    returned_bytes: float = 0.0
    num_returns: int = 0
    sequence_traffic_bytes: float = 0.0
    sequence_activation_bytes: float = 0.0
    num_ops: int = 0
    gathered_bytes: float = 0.0
    num_gathers: int = 0

    def __post_init__(self) -> None:
        for name in ("flops", "traffic_bytes", "activation_bytes", "parameter_bytes"):
            whole, cut = getattr(self, name), getattr(self, f"split_{name}")
            if not 0 <= cut <= whole:
                raise PlanError(f"part costs: split_{name} is {cut}, but {name} is {whole}; give 0 to {whole}")
        for name in ("traffic_bytes", "activation_bytes"):
            whole, shared = getattr(self, name), getattr(self, f"sequence_{name}")
            rest = whole - getattr(self, f"split_{name}")
            if not 0 <= shared <= rest + ROUNDING * whole:
                raise PlanError(f"part costs: sequence_{name} is {shared}, but {rest} are not split; give no more")

    def __add__(self, other: PartCosts) -> PartCosts:
        return PartCosts(*map(add, _VALUES(self), _VALUES(other)))

    @property
    def by_sequence(self) -> PartCosts:
        """Return the costs for a context parallel group: it cuts all work and no parameter, and gathers."""
        return replace(
            self,
            split_flops=self.flops,
            split_traffic_bytes=self.traffic_bytes,
            split_activation_bytes=max(0.0, self.activation_bytes - self.gathered_bytes),
            split_parameter_bytes=0.0,
            reduced_bytes=self.gathered_bytes,
            num_reductions=self.num_gathers,
            returned_bytes=self.gathered_bytes,
            num_returns=self.num_gathers,
            sequence_traffic_bytes=0.0,
            sequence_activation_bytes=0.0,
        )

    @property
    def in_sequence(self) -> PartCosts:
        """Return the costs for a tensor parallel group that shares the sequence."""
        traffic = min(self.traffic_bytes, self.split_traffic_bytes + self.sequence_traffic_bytes)
        kept = min(self.activation_bytes, self.split_activation_bytes + self.sequence_activation_bytes)
        return replace(
            self,
            split_traffic_bytes=traffic,
            split_activation_bytes=kept,
            sequence_traffic_bytes=0.0,
            sequence_activation_bytes=0.0,
        )

    def flops_at(self, share: float) -> float:
        """Return the FLOPs per row of a device that has `share` of what is cut."""
        return self.flops - self.split_flops * (1 - share)

    def traffic_bytes_at(self, share: float) -> float:
        """Return the bytes moved per row by a device that has `share` of what is cut."""
        return self.traffic_bytes - self.split_traffic_bytes * (1 - share)

    def activation_bytes_at(self, share: float) -> float:
        """Return the bytes kept per row by a device that has `share` of what is cut."""
        return self.activation_bytes - self.split_activation_bytes * (1 - share)

    def parameter_bytes_at(self, share: float) -> float:
        """Return the parameter bytes of a device that has `share` of what is cut."""
        return self.parameter_bytes - self.split_parameter_bytes * (1 - share)


_VALUES = attrgetter(*(field.name for field in fields(PartCosts)))


@dataclass(frozen=True)
class ProgramCosts:
    """Costs of a step with `rows` rows in all.

    boundary_bytes[k] is what one row hands over from block k to k + 1. `units` is how many parts the
    class that tensor parallelism cuts has (key-value heads, say): a group's ratios are whole numbers that
    add up to it; 1 means that nothing can be cut.
    """

    rows: int
    before: PartCosts
    blocks: tuple[PartCosts, ...]
    after: PartCosts
    boundary_bytes: tuple[float, ...] = ()
    units: int = 1

    def __post_init__(self) -> None:
        expected = max(0, len(self.blocks) - 1)
        if len(self.boundary_bytes) != expected:
            raise PlanError(
                f"program costs: {len(self.boundary_bytes)} boundaries for {len(self.blocks)} blocks; give {expected}"
            )
        if self.rows < 1 or self.units < 1:
            raise PlanError(f"program costs: rows {self.rows}, units {self.units}; give 1 or more of each")

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
        before, after, *blocks = (part.in_sequence for part in (self.before, self.after, *self.blocks))
        return replace(self, before=before, blocks=tuple(blocks), after=after)

    def under(self, plan: Plan) -> ProgramCosts:
        """Return the costs as a plan asks for them."""
        return self.in_sequence if plan.sequence_parallel else self

    @property
    def whole(self) -> PartCosts:
        """Return the costs of the whole program."""
        return self.stage(0, self.num_blocks)

    def stage(self, start: int, stop: int) -> PartCosts:
        """Return the costs of the blocks [start, stop), with what stands before and after them all."""
        if (start, stop) not in self._stages:
            before = (self.before,) if start == 0 else ()
            after = (self.after,) if stop == self.num_blocks else ()
            self._stages[start, stop] = reduce(add, (*before, *self.blocks[start:stop], *after), PartCosts())
        return self._stages[start, stop]

    @cached_property
    def _stages(self) -> dict[tuple[int, int], PartCosts]:
        """What stage() worked out: searches ask for the same few ranges over and over."""
        return {}

    def boundary(self, block: int) -> float:
        """Return the bytes per row handed over to block `block`; none at the ends."""
        return self.boundary_bytes[block - 1] if 0 < block < self.num_blocks else 0.0
