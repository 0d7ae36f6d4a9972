"""Which rows of the global batch each rank brings, and which each micro-batch of each pipeline takes.

The global batch is the concatenation of the ranks' rows in rank order; pipelines take consecutive intervals of it,
micro-batches consecutive intervals of their pipeline's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from hetu_fx.errors import BatchError
from hetu_fx.plans.plan import Plan, split_rows


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where rows come from and go to in one step.

    Attributes:
        owned: the rows that each rank brings, by number in the global batch.
        pipelines: the rows of each pipeline.
        micro_batches: for each pipeline, the rows of its micro-batches (some may be empty).
    """

    owned: tuple[range, ...]
    pipelines: tuple[range, ...]
    micro_batches: tuple[tuple[range, ...], ...]

    @property
    def total(self) -> int:
        """Return the number of rows of the global batch."""
        return self.pipelines[-1].stop


def check_rows(owned_rows: tuple[int, ...], *, shared: bool) -> None:
    """Raise BatchError if there are no rows, or not the same number on ranks that bring the same."""
    if shared and len(set(owned_rows)) > 1:
        raise BatchError(
            f"data='global' means the same batch on every rank, but the ranks bring {list(owned_rows)} rows; "
            f"use data='per_rank' if each rank has rows of its own"
        )
    if sum(owned_rows) == 0:
        raise BatchError("the batch has no rows on any rank")


def plan_rows(plan: Plan, owned_rows: tuple[int, ...], *, shared: bool) -> RowPlan:
    """Return the row plan of a step.

    Args:
        plan: says the pipelines' shares and micro-batches.
        owned_rows: rows that each rank brings.
        shared: all ranks bring the same rows (`data="global"`).
    """
    total = owned_rows[0] if shared else sum(owned_rows)
    owned = tuple(range(0, total) for _ in owned_rows) if shared else _intervals(0, owned_rows)
    split = split_rows(total, plan)
    pipelines = _intervals(0, tuple(map(sum, split)))
    micro = tuple(_intervals(p.start, rows) for p, rows in zip(pipelines, split, strict=True))
    return RowPlan(owned, pipelines, micro)


def _intervals(start: int, sizes: tuple[int, ...]) -> tuple[range, ...]:
    stops = [start + stop for stop in accumulate(sizes)]
    return tuple(range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True))
