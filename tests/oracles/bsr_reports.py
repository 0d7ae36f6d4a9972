"""What batched send-receives move, beside the least that any plan can move; and other choices of who sends."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, NodeOf, OwnerSet, Senders, TensorMove, plan_moves
from hetu_fx.comm_ops.plans.slices import Slice, finest_slices
from hetu_fx.comm_ops.plans.transition import Transition


@dataclass(frozen=True, slots=True)
class BsrReport:
    """Bytes and messages of all rounds; symbolic dims count as one entry.

    `least_bytes` and `least_inter_node_bytes` are lower bounds for any plan of the same moves; `largest_send`
    and `largest_receive` are those of the busiest rank.
    """

    total_bytes: int
    least_bytes: int
    inter_node_bytes: int
    least_inter_node_bytes: int
    largest_send: int
    largest_receive: int
    num_messages: int


def bsr_report(plans: Sequence[BsrPlan], node_of: NodeOf = lambda rank: 0) -> BsrReport:
    """Report plans that are carried out one after the other: one if fused, one per move if not."""
    messages = [message for plan in plans for part in plan.rounds for message in part.messages]
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for sender, receiver, num_bytes in messages:
        sent[sender] += num_bytes
        received[receiver] += num_bytes
    moves = [move for plan in plans for move in plan.moves]
    return BsrReport(
        total_bytes=sent.total(),
        least_bytes=sum(move.least_bytes for move in moves),
        inter_node_bytes=sum(size for a, b, size in messages if node_of(a) != node_of(b)),
        least_inter_node_bytes=sum(least_between_nodes(move, node_of) for move in moves),
        largest_send=max(sent.values(), default=0),
        largest_receive=max(received.values(), default=0),
        num_messages=len(messages),
    )


def least_between_nodes(move: TensorMove, node_of: NodeOf) -> int:
    """Count the bytes that must go from a node to another."""
    if move.source == move.target:
        return 0
    slices = finest_slices(Transition(move.source, move.target, move.shape))
    return sum(len(_nodes_without(part, node_of)) * part.numel for part in slices) * move.itemsize


def _nodes_without(part: Slice, node_of: NodeOf) -> set[int]:
    """Return the nodes that must be sent the slice: those of receivers where no copy has all its summands."""
    complete = (set.intersection(*({node_of(rank) for rank in ranks} for ranks in copy)) for copy in part.owners)
    return {node_of(rank) for rank in part.receivers}.difference(*complete)


def plan_each(moves: Sequence[TensorMove]) -> tuple[BsrPlan, ...]:
    """Plan every move alone, as `plan_moves` does: nothing fused and no load shared."""
    return tuple(plan_moves([move]) for move in moves)


def bytes_sent(plan: BsrPlan, rank: int) -> int:
    """Count the bytes that `rank` sends, in all rounds."""
    return sum(size for part in plan.rounds for sender, _, size in part.messages if sender == rank)


class LowestRank(Senders):
    """Chooses the lowest rank: Hetu v2's baseline without a heuristic."""

    def choose(self, owners: OwnerSet, receiver: int) -> int:
        return min(owners.ranks)


class RoundRobin(Senders):
    """Chooses the owners of every set in turn."""

    def __init__(self, node_of: NodeOf) -> None:
        super().__init__(node_of)
        self._turns: defaultdict[OwnerSet, itertools.count[int]] = defaultdict(itertools.count)

    def choose(self, owners: OwnerSet, receiver: int) -> int:
        return owners.ranks[next(self._turns[owners]) % len(owners.ranks)]
