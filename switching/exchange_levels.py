"""Exchanges of ranks on several nodes in two levels, as `comm_ops.two_level` has them, beside what else a rank does.

A level can only start when the one before has arrived, and a rank in its backward cannot wait for that: its peers may
need what it has yet to work out. So a thread takes the levels, exchange by exchange in the order in which all ranks
start them. Its messages are in groups of its own (`GroupTable.beside`), where no other message comes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hetu_fx.comm_ops.plans.algorithm import Form
from hetu_fx.comm_ops.wire.async_collectives import Exchange, segments
from hetu_fx.comm_ops.wire.groups import GroupTable, active
from hetu_fx.comm_ops.wire.serial_threads import InTurn
from hetu_fx.comm_ops.wire.two_level import gather_in_levels, groups_in_levels, reduce_in_levels, sum_in_levels

# Each takes the buffer, the sizes of its segments, the ranks, their nodes and a table, and works in place.
Levels = Callable[[Tensor, Sequence[int], Sequence[int], Sequence[int], GroupTable], None]

_turns: WeakKeyDictionary[GroupTable, InTurn] = WeakKeyDictionary()


def start_in_levels(levels: Levels, buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], form: Form) -> Exchange:
    """Start an exchange of host memory in two levels. Collective over `ranks`."""
    table = active()
    beside = table.beside("levels")
    for group in groups_in_levels(ranks, form.nodes, table.rank):
        beside.group(group)  # created here, as threads must not create groups side by side

    def work() -> None:
        with torch.no_grad():
            levels(buffer, sizes, ranks, form.nodes, beside)

    turn = _turns.setdefault(table, InTurn()).start(work)
    return Exchange(tuple(ranks), [turn])


def sum_all_in_levels(
    buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], nodes: Sequence[int], table: GroupTable
) -> None:
    """Do what `exchange.sum_all` does; sums are made per node first."""
    buffer.copy_(sum_in_levels(buffer, ranks, nodes, table))


def sum_segments_in_levels(
    buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], nodes: Sequence[int], table: GroupTable
) -> None:
    """Do what `exchange.sum_segments` does; sums are made per node first."""
    parts = segments(buffer, sizes)
    parts[table.position(ranks)].copy_(reduce_in_levels(parts, ranks, nodes, table))


def gather_segments_in_levels(
    buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], nodes: Sequence[int], table: GroupTable
) -> None:
    """Do what `exchange.gather_segments` does."""
    parts = segments(buffer, sizes)
    found = gather_in_levels(parts[table.position(ranks)], [[size] for size in sizes], ranks, nodes, table)
    for part, rank, value in zip(parts, ranks, found, strict=True):
        if rank != table.rank:
            part.copy_(value)
