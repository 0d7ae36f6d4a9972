"""Sums of one number over all ranks that nobody waits for before it is needed."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from hetu_fx.comm_ops.wire.collectives import Exchange, sum_all
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, Round, using
from hetu_fx.comm_ops.wire.small_sums import MARKS, are_alike, packed, refuse_unlike


def start_marked_sum(number: Tensor, table: GroupTable, what: str) -> Exchange:
    """Start to sum a tensor of one element over all ranks, in place; `what` it is.

    To wait for it raises DivergedError, on every rank, if some have started a sum of something else.
    """
    if (started := start_sum_by_round(number, table, what)) is not None:
        return started
    head, _ = packed(number, dist.ReduceOp.SUM, what)
    with using(table):
        return sum_all(Flat(head), range(table.size)).then(partial(_take, number, head, table, what))


def start_sum_by_round(number: Tensor, table: GroupTable, what: str) -> Exchange | None:
    """Do what `start_marked_sum` does for a tensor on the host, where ranks can say it; None, on all, where not."""
    if table.rounds is None or not number.is_cpu or number.numel() != 1 or table.is_mixed:
        return None
    said = table.rounds.say((number.item(),), what)
    return Exchange(tuple(range(table.size)), [said], partial(_take_heard, number, said), table)


def _take_heard(number: Tensor, said: Round) -> None:
    number.fill_(sum(value for (value,) in said.heard))


def _take(number: Tensor, head: Tensor, table: GroupTable, what: str) -> None:
    *marks, total = head[: MARKS + 1].tolist()
    if not are_alike(marks, dist.ReduceOp.SUM, table.size):
        refuse_unlike(table, what)
    number.fill_(total)
