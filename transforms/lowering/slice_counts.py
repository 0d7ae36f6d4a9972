"""In how many slices the products of a tensor parallel group are made, by what they and their messages take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.cluster.chips import find_chip
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import cheapest_ring_cost
from hetu_fx.comm_ops.plans.overlap import OverlapCost, Slices, best_slices
from hetu_fx.plans.plan import Stage

SLICE_SECONDS, HOST_SLICE_SECONDS = 5e-5, 1e-3
"""What a slice takes besides its work: launches, the start and the end of a message; on a host, whose processor also
runs the thread that sends and receives, the time in which these two wait for each other. Measured on processes of one
core each over gloo (float32, a product of 512 rows of 1360 with a weight of 1360 x 1024, whose sum is 2 MB;
milliseconds): product 14.1; sum 3.6 over 4 Gbit/s, all of it the processor's; both in 1, 2, 4 and 8 slices 18.7, 19.6,
21.4 and 26.0.
"""

HOST_BYTES_PER_SECOND = 1.1e9
"""What such a processor sends and receives, in all."""

FLOAT32_BYTES, LOW_BYTES = 4, 2
"""Of an entry, in float32 and in the dtypes that a stage may compute in instead."""

SUM, PART = 2, 1
"""Turns around the ring of a sum that all have, and of rows that are gathered or scattered."""


@dataclass(frozen=True, slots=True)
class Slicing:
    """Chooses slices from prices, which all ranks of a group have alike.

    Attributes:
        cluster: devices and links.
        stage: whose devices share the products.
    """

    cluster: Cluster
    stage: Stage

    def best(self, ranks: Sequence[int], turns: int, weight_entries: int, width: int) -> Slices:
        """Return the slices of products by `ranks` of weights of so many entries in all, whole.

        A row that travels has `width` entries, and goes `turns` times around the ring.
        """
        row_bytes = width * (FLOAT32_BYTES if self.stage.dtype is None else LOW_BYTES)
        return best_slices(lambda rows: self.beside(rows, ranks, turns, 2 * weight_entries, row_bytes))

    def beside(
        self, rows: int, ranks: Sequence[int], turns: int, flops_per_row: float, bytes_per_row: float
    ) -> OverlapCost:
        """Return what products of some rows take, of which so many bytes a row travel."""
        num_bytes = rows * bytes_per_row

        def sent(share: float) -> float:
            return turns * cheapest_ring_cost(share * num_bytes, ranks, self.cluster, of_sum=turns == SUM)

        product = self._product(rows * flops_per_row, ranks)
        if all(find_chip(self.cluster.device(rank).kind) is not None for rank in ranks):
            return OverlapCost(product, sent, SLICE_SECONDS)
        return OverlapCost(product, sent, HOST_SLICE_SECONDS, self._on_host(num_bytes, ranks, sent(1)))

    def _product(self, flops: float, ranks: Sequence[int]) -> float:
        """Return the seconds of the slowest rank's share."""
        shares = {rank: self.stage.work_shares[self.stage.devices.index(rank)] for rank in ranks}
        total = sum(shares.values())
        computing = {rank: self.cluster.computing(rank, self.stage.dtype) for rank in ranks}
        return max(flops * share / total / computing[rank].speed for rank, share in shares.items())

    def _on_host(self, num_bytes: float, ranks: Sequence[int], sent_seconds: float) -> float:
        """Return for how long processors that compute communicate; all of it where they read each other's memory."""
        if len({self.cluster.device(rank).node for rank in ranks}) == 1:
            return sent_seconds
        return 2 * num_bytes / HOST_BYTES_PER_SECOND
