"""The way of a sum over all ranks in few hops: to a head for each node, between heads in pairs, and back.

Recursive doubling needs a power of two, so where nodes are no such number, some send to the head of another node. Every
rank gets the same bits: two heads that meet add the same two numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SumSteps:
    """What one rank does: it sends to its head and hears the sum from there; or, itself a head, it does all else.

    Attributes:
        head: its head, which may be itself.
        members: the ranks that send to it, in order.
        partners: the heads that it exchanges sums with, one after the other.
    """

    head: int
    members: tuple[int, ...] = ()
    partners: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SumTree:
    """Who sends to whom.

    Attributes:
        head_of: the head of each rank.
        heads: a power of two of them, in order.
    """

    head_of: tuple[int, ...]
    heads: tuple[int, ...]

    def steps(self, rank: int) -> SumSteps:
        """Return what one rank does."""
        head = self.head_of[rank]
        if head != rank:
            return SumSteps(head)
        members = tuple(other for other, found in enumerate(self.head_of) if found == head != other)
        place = self.heads.index(rank)
        return SumSteps(head, members, tuple(self.heads[place ^ (1 << power)] for power in range(self._doublings)))

    @property
    def hops(self) -> int:
        """Count the messages that a number goes by, one after the other: at most 2 + log2(nodes)."""
        return self._doublings + 2 * (len(self.heads) < len(self.head_of))

    @property
    def _doublings(self) -> int:
        return len(self.heads).bit_length() - 1


def sum_tree(nodes: Sequence[Hashable]) -> SumTree:
    """Return the tree for ranks on some nodes, by the node of each rank; the first ranks of nodes are heads."""
    firsts = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    ordered = sorted(firsts.values())
    heads = ordered[: 1 << (len(ordered).bit_length() - 1)]
    head = {rank: heads[place % len(heads)] for place, rank in enumerate(ordered)}
    return SumTree(tuple(head[firsts[node]] for node in nodes), tuple(heads))
