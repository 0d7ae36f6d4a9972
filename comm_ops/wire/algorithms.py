"""Collectives by the algorithm that their op carries: the one place where flat, padded and two-level part.

Where ranks can, they read each other's memory instead of sending (`peers`): of one node as a rule, inside of it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from hetu_fx.comm_ops.plans.algorithm import Algorithm
from hetu_fx.comm_ops.wire.collectives import Exchange, GroupCollectives
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.peers.exchanges import SharedMemoryCollectives, Summand
from hetu_fx.comm_ops.wire.peers.memory import peers_worth_reading
from hetu_fx.comm_ops.wire.two_level import TwoLevelCollectives, gathered_bytes, one_level


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of some ranks; each is started, and ended by `wait`. See `GroupCollectives`.

    Attributes:
        ranks: in the order of parts.
        algorithm: says by size how they run.
        table: of the ranks.
        number: None: of an op. Else they work in place on buffers of the bridge, which go in levels from the host
            alone, as NCCL finds its own way between nodes, and are not padded.
        is_async: see `GroupCollectives`.
    """

    ranks: Sequence[int]
    algorithm: Algorithm
    table: GroupTable
    number: int | None = None
    is_async: bool = True

    def sum(self, x: Tensor | Summand) -> Exchange[Tensor]:
        """Sum a tensor, or what was made where `place_of_sum` says."""
        like = x.value if isinstance(x, Summand) else x
        return self._by_size(like, like.nbytes).sum(x)

    def gather(
        self, x: Tensor, shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None = None
    ) -> Exchange[list[Tensor]]:
        """Bring the tensors of all ranks to all; see `GroupCollectives.gather`."""
        return self._by_size(x, gathered_bytes(x, shapes)).gather(x, shapes, into)

    def scatter(self, parts: Sequence[Tensor]) -> Exchange[Tensor]:
        """Sum this rank's part; see `GroupCollectives.scatter`."""
        return self._by_size(parts[0], sum(part.nbytes for part in parts)).scatter(parts)

    def place_of_sum(self, like: Tensor, shape: Sequence[int]) -> Summand | None:
        """Return where to make what `sum` is to sum, so that others read it there; None where it does not matter.

        Nobody but the sum has it. All ranks ask alike.
        """
        reader = self.reader(like, prod(shape) * like.itemsize)
        return None if reader is None else reader.place(shape, like.dtype)

    def reader(self, like: Tensor, num_bytes: int) -> SharedMemoryCollectives | None:
        """Return what carries so many bytes by memory of ranks that all have tensors like one; None where they send."""
        found = replace(self, number=None)._by_size(like, num_bytes)
        return replace(found, number=self.number) if isinstance(found, SharedMemoryCollectives) else None

    def meet(self, num_bytes: int, *, on_host: bool) -> None:
        """Connect the ranks for so many bytes, if they are not yet; collective over them."""
        if len(self.ranks) > 1 and not self._in_levels(num_bytes, on_host=on_host):
            self.table.group(self.ranks)
            peers_worth_reading(num_bytes, self.ranks, self.table, on_host=on_host)

    def _in_levels(self, num_bytes: int, *, on_host: bool) -> bool:
        return (on_host or self.number is None) and self.algorithm.in_two_levels(num_bytes)

    def _by_size(self, like: Tensor, num_bytes: int) -> GroupCollectives:
        if self._in_levels(num_bytes, on_host=like.is_cpu):
            tiers = self.algorithm.tiers
            return TwoLevelCollectives(self.ranks, self.table, self.number, self.is_async, tiers=tiers)
        pads = self.number is None and self.algorithm.pads(num_bytes)
        return one_level(like, num_bytes, self.ranks, self.table, self.number, is_async=self.is_async, pads=pads)
