"""Time the collectives as they run, padded and grouped, on the devices at hand.

Parts are near equal, and not equal: padding costs next to nothing, and still each part goes in a message of its own
where parts are grouped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hetu_fx.cluster.devices import Collective
from hetu_fx.comm_ops.wire.collectives import gather_padded, gather_parts, reduce_padded, reduce_parts, sum_over
from hetu_fx.comm_ops.wire.consensus import of_all
from hetu_fx.comm_ops.wire.groups import GroupTable

SIZES = (1 << 14, 1 << 22)
"""Bytes of the whole tensor: one size tells the latency, both together the bandwidth."""

_ROUNDS = 5

Run = Callable[[Sequence[Tensor], Sequence[int], GroupTable], object]


def _all_reduce(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> object:
    return sum_over(torch.cat(list(parts)), ranks, table)


def _all_gather(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> object:
    return gather_padded(parts[table.position(ranks)], [part.shape for part in parts], ranks, table)


def _grouped_all_gather(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> object:
    return gather_parts(parts[table.position(ranks)], [part.shape for part in parts], ranks, table)


COLLECTIVES: Mapping[str, Run] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": reduce_padded,
    "grouped_all_gather": _grouped_all_gather,
    "grouped_reduce_scatter": reduce_parts,
}
"""What is timed; without `grouped`, uneven parts are padded to the largest."""


def time_collectives(
    table: GroupTable, groups: Mapping[str, Sequence[int]], device: str = "cpu"
) -> tuple[Collective, ...]:
    """Return what each collective takes among each group of ranks, by the group's name; collective over the table."""
    found = []
    for where, ranks in groups.items():
        for name, run in COLLECTIVES.items():
            own = [_seconds(run, size, ranks, table, device) for size in SIZES] if table.rank in ranks else None
            everyone = [seconds for seconds in of_all(table, own) if seconds is not None]
            small, large = (max(column) for column in zip(*everyone, strict=True))
            found.append(line_through(name, where, len(ranks), small, large))
    return tuple(found)


def line_through(name: str, where: str, num_ranks: int, small: float, large: float) -> Collective:
    """Return the collective that takes `small` and `large` seconds for the two sizes; the first is its latency."""
    bandwidth = (SIZES[1] - SIZES[0]) / max(large - small, 1e-9)
    return Collective(name, where, num_ranks, float(f"{bandwidth:.3g}"), float(f"{small:.3g}"))


def _seconds(run: Run, num_bytes: int, ranks: Sequence[int], table: GroupTable, device: str) -> float:
    """Return the median seconds of this rank, after one round that warms up."""
    each = max(1, num_bytes // len(ranks) // torch.float32.itemsize)
    lengths = [each] * (len(ranks) - 1) + [each + 1]
    parts = [torch.zeros(length, device=device) for length in lengths]
    times = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        run(parts, ranks, table)
        if parts[0].is_cuda:
            torch.cuda.synchronize(parts[0].device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
