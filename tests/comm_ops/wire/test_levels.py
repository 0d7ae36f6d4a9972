"""Collectives in two levels between ranks that are threads, those in threads beside a rank's own included."""

from __future__ import annotations

import torch

from hetu_fx.comm_ops.plans.algorithm import Algorithm
from hetu_fx.comm_ops.wire.algorithms import Collectives
from hetu_fx.comm_ops.wire.groups import GroupTable, active
from hetu_fx.comm_ops.wire.threads import run_in_threads
from tests.comm_ops.at_once import chosen

RANKS = tuple(range(8))
LEVELS = Algorithm((0, 0, 0, 1, 2, 2, 3, 3), 0, outer=((0, 0, 0, 0, 1, 1, 1, 1),))
SIZES = (3, 1, 4, 1, 5, 0, 2, 6)
PLAIN = torch.arange(float(sum(SIZES)))
TOTAL = 8 * PLAIN + 2800


def test_two_levels_bring_what_a_flat_collective_brings() -> None:
    def work(table: GroupTable) -> None:
        whole, shapes = PLAIN + 100 * table.rank, [[size] for size in SIZES]
        assert torch.equal(chosen(RANKS, LEVELS, table).sum(whole).wait(), TOTAL)
        gathered = chosen(RANKS, LEVELS, table).gather(whole.split(SIZES)[table.rank], shapes).wait()
        expected = [part + 100 * rank for rank, part in enumerate(PLAIN.split(SIZES))]
        assert torch.equal(torch.cat(list(gathered)), torch.cat(expected))
        scattered = chosen(RANKS, LEVELS, table).scatter(whole.split(SIZES)).wait()
        assert torch.equal(scattered, TOTAL.split(SIZES)[table.rank])

    run_in_threads(8, work)


def test_what_runs_beside_a_rank_takes_turns_too_and_has_groups_of_its_own() -> None:
    def work(table: GroupTable) -> bool:
        first, second = PLAIN + 100 * table.rank, PLAIN + 100 * table.rank
        under_way, parts = Collectives(RANKS, LEVELS, table, 0), second.split(SIZES)
        sums = under_way.sum(first)
        gathers = under_way.gather(parts[table.rank], [[size] for size in SIZES], parts)
        assert active() is table
        gathers.wait()
        sums.wait()
        expected = [part + 100 * rank for rank, part in enumerate(PLAIN.split(SIZES))]
        assert torch.equal(first, TOTAL)
        assert torch.equal(second, torch.cat(expected))
        return table.beside("levels") is not table

    assert run_in_threads(8, work) == [True] * 8
