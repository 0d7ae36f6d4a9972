"""What a batched send-receive moves, beside the least that any plan can move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, TensorMove
from hetu_fx.comm_ops.plans.bsr_senders import NodeOf
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
    least = [_least(move, node_of) for plan in plans for move in plan.moves]
    return BsrReport(
        total_bytes=sent.total(),
        least_bytes=sum(total for total, _ in least),
        inter_node_bytes=sum(size for a, b, size in messages if node_of(a) != node_of(b)),
        least_inter_node_bytes=sum(between for _, between in least),
        largest_send=max(sent.values(), default=0),
        largest_receive=max(received.values(), default=0),
        num_messages=len(messages),
    )


def least_bytes(move: TensorMove) -> int:
    """Count the bytes that any plan of one move must send."""
    return _least(move, lambda rank: 0)[0]


def _least(move: TensorMove, node_of: NodeOf) -> tuple[int, int]:
    if move.source == move.target:
        return 0, 0
    slices = finest_slices(Transition(move.source, move.target, move.shape))
    total = sum(_least_copies(part) * part.numel for part in slices)
    between = sum(len(_nodes_without(part, node_of)) * part.numel for part in slices)
    return total * move.itemsize, between * move.itemsize


def _least_copies(part: Slice) -> int:
    """Count how often the slice must travel, at least.

    Where somebody owns the value, every receiver that does not takes one. Else the summands have to meet (one
    message less than there are summands), and all receivers but one that they may meet at take one.
    """
    values = {rank for copy in part.owners if len(copy) == 1 for rank in copy[0]}
    receivers = set(part.receivers)
    if values or not receivers:
        return len(receivers - values)
    owners = {rank for copy in part.owners for ranks in copy for rank in ranks}
    return min(map(len, part.owners)) - 1 + len(receivers) - bool(receivers & owners)


def _nodes_without(part: Slice, node_of: NodeOf) -> set[int]:
    """Return the nodes that must be sent the slice: those of receivers where no copy has all its summands."""
    complete = (set.intersection(*({node_of(rank) for rank in ranks} for ranks in copy)) for copy in part.owners)
    return {node_of(rank) for rank in part.receivers}.difference(*complete)
