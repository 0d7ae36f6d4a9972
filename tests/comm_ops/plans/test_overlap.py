"""In how many slices a product is made beside its communication, by what both take."""

from __future__ import annotations

from functools import partial

import pytest

from hetu_fx.comm_ops.plans.overlap import COUNTS, OverlapCost, Slices, best_slices, parse_slices
from hetu_fx.errors import CommError


def beside(rows: int, *, product: float, sent: float, slice_seconds: float = 0.0, latency: float = 0.0) -> OverlapCost:
    """Let a row take so many seconds."""
    return OverlapCost(rows * product, lambda share: latency + rows * share * sent, slice_seconds)


@pytest.mark.parametrize("slices", COUNTS)
def test_of_both_the_longer_one_is_seen_and_a_slice_of_the_other(slices: int) -> None:
    longer, shorter = beside(8, product=3.0, sent=1.0), beside(8, product=1.0, sent=3.0)
    for one in (longer, shorter):
        assert one.seconds(slices) == pytest.approx(24 + 8 / slices)


def test_what_costs_nothing_is_cut_in_as_many_slices_as_there_may_be() -> None:
    assert beside(8, product=1.0, sent=1.0).slices == COUNTS[-1]


def test_slices_that_cost_more_than_they_hide_are_one() -> None:
    assert beside(8, product=1.0, sent=1.0, slice_seconds=9.0).slices == 1
    assert beside(8, product=1.0, sent=1.0, latency=9.0).slices == 1
    assert beside(8, product=1.0, sent=0.01).slices == 1


def test_a_processor_that_communicates_itself_hides_nothing() -> None:
    assert OverlapCost(8.0, lambda share: 8 * share, 0.0, host_seconds=8.0).slices == 1


def test_more_rows_are_cut_in_more_slices() -> None:
    found = best_slices(partial(beside, product=1e-6, sent=1e-6, slice_seconds=1e-4))
    assert [count for count, _ in found.bounds] == [2, 4, 8]
    least = [rows for _, rows in found.bounds]
    assert least == sorted(least)
    assert all(rows & (rows - 1) == 0 for rows in least)
    assert [found.count(rows) for rows in (0, least[0] - 1, least[0], least[1], 10 * least[2])] == [1, 1, 2, 4, 8]


def test_a_slice_has_a_row_at_least() -> None:
    assert [Slices(((4, 1),)).count(rows) for rows in (1, 3, 4)] == [1, 1, 4]


def test_slices_are_read_as_they_are_written() -> None:
    for slices in (Slices(), Slices(((2, 512), (8, 4096)))):
        assert parse_slices(str(slices)) == slices
    with pytest.raises(CommError, match="cannot read the slices 'many'\nhint: write them like"):
        parse_slices("many")
