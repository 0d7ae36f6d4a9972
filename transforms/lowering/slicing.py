"""In how many slices the products of a tensor parallel group are made, by what they and their messages take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetu_fx.cluster.chips import find_chip
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import cheapest_ring_cost
from hetu_fx.comm_ops.plans.overlap import Beside, Slices, best_slices
from hetu_fx.plans.plan import Stage

SLICE_SECONDS = 1.5e-4
"""What a slice takes on a host besides its work: a product, the start and the end of a message, and copies."""

HOST_BYTES_PER_SECOND = 1.4e9
"""What a processor sends and receives of a stream of bytes, as it was measured between processes of one machine."""

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
        row_bytes = width * getattr(torch, self.stage.dtype or "float32").itemsize
        return best_slices(lambda rows: self.beside(rows, ranks, turns, 2 * weight_entries, row_bytes))

    def beside(self, rows: int, ranks: Sequence[int], turns: int, flops_per_row: float, bytes_per_row: float) -> Beside:
        """Return what products of some rows take, of which so many bytes a row travel."""
        num_bytes = rows * bytes_per_row

        def sent(share: float) -> float:
            return turns * cheapest_ring_cost(share * num_bytes, ranks, self.cluster, of_sum=turns == SUM)

        host = self._on_host(num_bytes, ranks, sent(1))
        return Beside(self._product(rows * flops_per_row, ranks), sent, SLICE_SECONDS, host)

    def _product(self, flops: float, ranks: Sequence[int]) -> float:
        """Return the seconds of the slowest rank's share."""
        shares = {rank: self.stage.work_shares[self.stage.devices.index(rank)] for rank in ranks}
        total = sum(shares.values())
        computing = {rank: self.cluster.computing(rank, self.stage.dtype) for rank in ranks}
        return max(flops * share / total / computing[rank].speed for rank, share in shares.items())

    def _on_host(self, num_bytes: float, ranks: Sequence[int], sent_seconds: float) -> float:
        """Return for how long processors that compute communicate; all of it where they read each other's memory."""
        devices = [self.cluster.device(rank) for rank in ranks]
        if all(find_chip(device.kind) is not None for device in devices):
            return 0.0
        if len({device.node for device in devices}) == 1:
            return sent_seconds
        return 2 * num_bytes / HOST_BYTES_PER_SECOND
