"""What goes around between the devices of a stage for each row of a micro-batch, and among whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Stage

SUM, GATHER = 2, 1
"""Turns around the ring of a sum over a group, and of a gather or a reduce-scatter."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Messages that a group of devices sends round; groups of one `kind` do so at the same time.

    Attributes:
        kind: of turns, SUM or GATHER.
        ranks: the group.
        forward, backward: bytes per row that go round, of all devices.
        num_forward, num_backward: in how many messages.
    """

    kind: int
    ranks: tuple[int, ...]
    forward: float
    backward: float
    num_forward: int
    num_backward: int

    @classmethod
    def of(cls, kind: int, ranks: tuple[int, ...], parts: PartCosts, share: float = 1.0) -> Rounds:
        """Return what a group sends round that has `share` of each row."""
        counts = parts.num_reductions, parts.num_returns
        return cls(kind, ranks, parts.reduced_bytes * share, parts.returned_bytes * share, *counts)


def rounds_of(stage: Stage, whole: PartCosts, by_device: Sequence[PartCosts]) -> Iterator[Rounds]:
    """Yield what goes round in a stage.

    Args:
        stage: its devices.
        whole: the costs of its part of the program for a tensor parallel group.
        by_device: those of each device for the way in which the devices share work.
    """
    if not stage.is_grid:
        yield Rounds.of(GATHER if stage.shares_sequence else SUM, stage.devices, by_device[0])
        return
    for ranks, parts in zip(stage.context_groups, by_device, strict=False):
        yield Rounds.of(GATHER, ranks, parts)
    size = len(stage.tensor_groups[0])
    for ranks, (context, _) in zip(stage.tensor_groups, stage.shares[::size], strict=True):
        yield Rounds.of(SUM, ranks, whole, context)
