"""What one part of a program costs: a repeated block, or what stands before the blocks or after them.

Quantities that grow with the batch are given per row. `split_...` is how much of a quantity a tensor parallel group
cuts in parts; the rest is done, or held, by every device of the group.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import add, attrgetter

from hetu_fx.errors import PlanError
from hetu_fx.plans.recomputed import RecomputedOps

ROUNDING = 1e-9
RING_RETURNS = 2
"""Turns of the backward of a ring: keys and values go round again, and their gradients beside them."""


@dataclass(frozen=True, slots=True)
class PartCosts:
    """Costs of one part, forward only where it is work.

    flops, traffic_bytes (memory moved by ops that are not products), activation_bytes (kept for the
    backward), reduced_bytes (all-reduced in the forward by a tensor parallel group, in num_reductions
    messages), returned_bytes (all-reduced in the backward, in num_returns) and gathered_bytes (of keys and values,
    gathered by a context parallel group in num_gathers) are per row. `ring_bytes` are those of them that go round in
    parts instead. `sequence_...` is what a tensor parallel group cuts besides if it shares the sequence.
    `heads_bytes`, in num_head_exchanges messages, are those of what attention compares and makes, which devices that
    share it by heads exchange; `exchanged_bytes` and num_exchanges are the same where they do.
    `attention_flops` are those of products of activations with each other.
    `repeated_parameter_bytes` are those of parameters of which several devices of a group hold the same part,
    `late_parameter_bytes` those of them of whose gradients each of these makes a summand.
    `summed_flops` are those of products with weights whose results are all-reduced: `summed_bytes` of `reduced_bytes`,
    in num_summed messages. `beside_flops` are those of products with weights that read what alone of them is
    all-reduced in the backward: `beside_bytes` of `returned_bytes`, in num_beside messages.
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
    ring_bytes: float = 0.0
    attention_flops: float = 0.0
    split_attention_flops: float = 0.0
    heads_bytes: float = 0.0
    num_head_exchanges: int = 0
    exchanged_bytes: float = 0.0
    num_exchanges: int = 0
    repeated_parameter_bytes: float = 0.0
    late_parameter_bytes: float = 0.0
    summed_flops: float = 0.0
    summed_bytes: float = 0.0
    num_summed: int = 0
    beside_flops: float = 0.0
    beside_bytes: float = 0.0
    num_beside: int = 0

    def __post_init__(self) -> None:
        for name in ("flops", "attention_flops", "traffic_bytes", "activation_bytes", "parameter_bytes"):
            whole, cut = getattr(self, name), getattr(self, f"split_{name}")
            if not 0 <= cut <= whole:
                raise PlanError(f"part costs: split_{name} is {cut}, but {name} is {whole}\nhint: give 0 to {whole}")
        for name in ("traffic_bytes", "activation_bytes"):
            whole, shared = getattr(self, name), getattr(self, f"sequence_{name}")
            rest = whole - getattr(self, f"split_{name}")
            if not 0 <= shared <= rest + ROUNDING * whole:
                raise PlanError(
                    f"part costs: sequence_{name} is {shared}, but {rest} are not split\nhint: give no more"
                )

    def __add__(self, other: PartCosts) -> PartCosts:
        return PartCosts(*map(add, _VALUES(self), _VALUES(other)))

    @property
    def by_sequence(self) -> PartCosts:
        """Return the costs for a context parallel group: it cuts all work and no parameter, and gathers."""
        return replace(
            self,
            split_flops=self.flops,
            split_attention_flops=self.attention_flops,
            split_traffic_bytes=self.traffic_bytes,
            split_activation_bytes=max(0.0, self.activation_bytes - self.gathered_bytes),
            split_parameter_bytes=0.0,
            reduced_bytes=self.gathered_bytes + self.ring_bytes,
            num_reductions=self.num_gathers,
            returned_bytes=self.gathered_bytes + RING_RETURNS * self.ring_bytes,
            num_returns=self.num_gathers * (RING_RETURNS if self.ring_bytes else 1),
            sequence_traffic_bytes=0.0,
            sequence_activation_bytes=0.0,
        )

    @property
    def work(self) -> PartCosts:
        """Return what grows with rows but is not kept: what is done, and sent inside a group, in no message more."""
        kept = {name: 0 for name in _NAMES if name.startswith("num_") or name in _HELD}
        return replace(self, **kept)

    def times(self, factor: float) -> PartCosts:
        """Return the costs of so many times as many rows, of `work`: counts and parameters would be multiplied too."""
        return PartCosts(*(value * factor if value else value for value in _VALUES(self)))

    def narrowed(self, share: float, gathered: float) -> PartCosts:
        """Return the costs of a device that has `share` of what a tensor parallel group cuts, as all that there is.

        It has `gathered` of the keys and values.
        """
        return replace(
            self,
            flops=self.flops_at(share),
            split_flops=0.0,
            attention_flops=self.attention_flops - self.split_attention_flops * (1 - share),
            split_attention_flops=0.0,
            traffic_bytes=self.traffic_bytes_at(share),
            split_traffic_bytes=0.0,
            activation_bytes=self.activation_bytes_at(share),
            split_activation_bytes=0.0,
            parameter_bytes=self.parameter_bytes_at(share),
            split_parameter_bytes=0.0,
            sequence_traffic_bytes=0.0,
            sequence_activation_bytes=0.0,
            gathered_bytes=self.gathered_bytes * gathered,
            ring_bytes=self.ring_bytes * gathered,
        )

    @property
    def in_ring(self) -> PartCosts:
        """Return the costs where keys and values go round in parts, so that no device has all of them."""
        return replace(self, gathered_bytes=0.0, ring_bytes=self.gathered_bytes + self.ring_bytes)

    @property
    def in_heads(self) -> PartCosts:
        """Return the costs where devices that share a sequence exchange tokens for heads."""
        sent = {"exchanged_bytes": self.heads_bytes, "num_exchanges": self.num_head_exchanges}
        return replace(self, gathered_bytes=0.0, num_gathers=0, ring_bytes=0.0, **sent)  # type: ignore[arg-type]

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

    def again(self, ops: RecomputedOps) -> PartCosts:
        """Return the costs of those ops alone, forward; ops that are not products are counted in all."""
        if ops == "all":
            return self
        flops = (self.attention_flops, self.split_attention_flops) if ops == "attention" else (0.0, 0.0)
        return replace(self, flops=flops[0], split_flops=flops[1], parameter_bytes=0.0, split_parameter_bytes=0.0)

    def flops_at(self, share: float) -> float:
        """Return the FLOPs per row of a device that has `share` of what is cut."""
        return self.flops - self.split_flops * (1 - share)

    def weight_flops_at(self, share: float) -> float:
        """Return the FLOPs per row, in products with weights, of a device that has `share` of what is cut."""
        attention = self.attention_flops - self.split_attention_flops * (1 - share)
        return max(0.0, self.flops_at(share) - attention)

    def traffic_bytes_at(self, share: float) -> float:
        """Return the bytes moved per row by a device that has `share` of what is cut."""
        return self.traffic_bytes - self.split_traffic_bytes * (1 - share)

    def activation_bytes_at(self, share: float) -> float:
        """Return the bytes kept per row by a device that has `share` of what is cut."""
        return self.activation_bytes - self.split_activation_bytes * (1 - share)

    def parameter_bytes_at(self, share: float) -> float:
        """Return the parameter bytes of a device that has `share` of what is cut."""
        return self.parameter_bytes - self.split_parameter_bytes * (1 - share)


_NAMES = tuple(field.name for field in fields(PartCosts))
_VALUES = attrgetter(*_NAMES)
_HELD = frozenset(
    (
        *("activation_bytes", "split_activation_bytes", "sequence_activation_bytes"),
        *("parameter_bytes", "split_parameter_bytes", "repeated_parameter_bytes", "late_parameter_bytes"),
    )
)

NO_COSTS = PartCosts()
