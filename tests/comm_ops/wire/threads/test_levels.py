"""Collectives in two levels between ranks that are threads, those in threads beside a rank's own included."""

from __future__ import annotations

import torch

from hetu_fx.comm_ops.plans.algorithm import Algorithm
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, active
from hetu_fx.comm_ops.wire.threads.run import run_in_threads
from hetu_fx.comm_ops.wire.two_level import (
    all_gather_two_level,
    all_reduce_two_level,
    gather_segments_in_levels,
    reduce_scatter_two_level,
    start_in_levels,
    sum_all_in_levels,
)

RANKS = tuple(range(8))
LEVELS = Algorithm((0, 0, 0, 1, 2, 2, 3, 3), 0, outer=((0, 0, 0, 0, 1, 1, 1, 1),))
SIZES = (3, 1, 4, 1, 5, 0, 2, 6)
PLAIN = torch.arange(float(sum(SIZES)))
TOTAL = 8 * PLAIN + 2800


def test_two_levels_bring_what_a_flat_collective_brings() -> None:
    def work(table: GroupTable) -> None:
        whole, shapes = PLAIN + 100 * table.rank, [[size] for size in SIZES]
        assert torch.equal(all_reduce_two_level(whole, RANKS, LEVELS, table), TOTAL)
        gathered = all_gather_two_level(whole.split(SIZES)[table.rank], shapes, RANKS, LEVELS, table)
        expected = [part + 100 * rank for rank, part in enumerate(PLAIN.split(SIZES))]
        assert torch.equal(torch.cat(list(gathered)), torch.cat(expected))
        scattered = reduce_scatter_two_level(whole.split(SIZES), RANKS, LEVELS, table)
        assert torch.equal(scattered, TOTAL.split(SIZES)[table.rank])

    run_in_threads(8, work)


def test_what_runs_beside_a_rank_takes_turns_too_and_has_groups_of_its_own() -> None:
    def work(table: GroupTable) -> bool:
        first, second = PLAIN + 100 * table.rank, PLAIN + 100 * table.rank
        sums = start_in_levels(sum_all_in_levels, Flat(first), SIZES, RANKS, LEVELS)
        gathers = start_in_levels(gather_segments_in_levels, Flat(second), SIZES, RANKS, LEVELS)
        assert active() is table
        gathers.wait()
        sums.wait()
        expected = [part + 100 * rank for rank, part in enumerate(PLAIN.split(SIZES))]
        assert torch.equal(first, TOTAL)
        assert torch.equal(second, torch.cat(expected))
        return table.beside("levels") is not table

    assert run_in_threads(8, work) == [True] * 8
