"""Which parts of a program travel together between home and the replicas that compute with them, on paper.

Replicas whose stages have other borders meet in other groups: parts that the same stages hold share buckets, each of
about the bytes of the runtime's. Gradients become ready from the last block to the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetu_fx.comm_ops.plans.cost import BUCKET_BYTES
from hetu_fx.planner.values.program import ProgramCosts

Holders = tuple[int, ...]
"""For every pipeline the part of it that holds a block."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The blocks [start, stop), with what stands before and after them all, and who holds them."""

    start: int
    stop: int
    holders: Holders


def buckets(costs: ProgramCosts, stops: Sequence[Sequence[int]]) -> tuple[Bucket, ...]:
    """Return the buckets of a program from its last block to its first.

    Args:
        costs: of the program.
        stops: where the blocks of each part of a pipeline begin, and where the last one's end; for every pipeline.
    """
    if not costs.num_blocks:
        return (Bucket(0, 0, (0,) * len(stops)),)
    return tuple(_cut(costs, [_holders(block, stops) for block in range(costs.num_blocks)]))


def _holders(block: int, stops: Sequence[Sequence[int]]) -> Holders:
    return tuple(next(i for i, stop in enumerate(own[1:]) if block < stop) for own in stops)


def _cut(costs: ProgramCosts, holders: Sequence[Holders]) -> Iterator[Bucket]:
    stop, filled = costs.num_blocks, 0.0
    for block in reversed(range(costs.num_blocks)):
        size = costs.between(block, block + 1).parameter_bytes
        if block + 1 < stop and (holders[block] != holders[stop - 1] or filled + size > BUCKET_BYTES):
            yield Bucket(block + 1, stop, holders[stop - 1])
            stop, filled = block + 1, 0.0
        filled += size
    yield Bucket(0, stop, holders[0])
