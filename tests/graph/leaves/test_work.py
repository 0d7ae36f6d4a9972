"""What a leaf takes is counted where it is tried, and told for other sizes."""

from __future__ import annotations

import pytest
import torch

from hetu_fx.errors import StateError
from hetu_fx.graph.leaves.work import CountWork, LeafWork, WorkBySize


def counted(rows: int, width: int = 3) -> LeafWork:
    x = torch.ones(rows, width)
    with CountWork() as found:
        (x @ x.t()).view(-1).exp()
    made: LeafWork = found.work
    return made


def told(*calls: tuple[int, float], width: int = 3) -> WorkBySize:
    """Return what is told by the FLOPs of calls with some rows."""
    return WorkBySize.of(([[rows, width]], LeafWork(flops)) for rows, flops in calls)


def test_products_count_their_flops_other_ops_the_bytes_that_they_move_and_views_nothing() -> None:
    assert counted(4) == LeafWork(flops=2 * 4 * 4 * 3, traffic_bytes=2 * 4 * 4 * 4, num_ops=4)


def test_what_is_written_in_place_is_moved() -> None:
    with CountWork() as found:
        torch.ones(8).add_(1.0)
    assert found.work.traffic_bytes >= 4 * 8 * 3, "made, read and written"


def test_a_size_of_which_work_is_the_square_is_told_from_three_calls() -> None:
    by_size = WorkBySize.of(([[rows, 3]], counted(rows)) for rows in (4, 5, 7))
    for rows in (1, 4, 64):
        assert by_size.at([[rows, 3]]).flops == pytest.approx(counted(rows).flops)
        assert by_size.at([[rows, 3]]).traffic_bytes == pytest.approx(counted(rows).traffic_bytes)


def test_two_sizes_multiply() -> None:
    shapes = [(4, 3), (5, 3), (7, 3), (4, 6), (4, 9)]
    by_size = WorkBySize.of(([list(shape)], counted(*shape)) for shape in shapes)
    assert by_size.at([[8, 12]]).flops == pytest.approx(counted(8, 12).flops)


def test_two_calls_make_a_line() -> None:
    assert told((4, 10.0), (6, 14.0)).at([[100, 3]]).flops == 10 + 2 * 96


def test_work_that_values_decide_makes_no_parabola_that_falls() -> None:
    by_size = told((4, 10.0), (5, 14.0), (7, 15.0))
    flops = [by_size.at([[rows, 3]]).flops for rows in (1, 4, 7, 100, 1000)]
    assert flops == sorted(flops)
    assert flops[1] == 10.0


def test_where_more_rows_took_less_the_example_tells_all() -> None:
    by_size = told((4, 10.0), (5, 9.0), (7, 8.0))
    assert by_size.at([[1000, 3]]).flops == 10.0


def test_calls_with_the_example_s_sizes_tell_nothing_more() -> None:
    assert told((4, 10.0), (4, 11.0)).at([[9, 3]]) == LeafWork(10.0)


def test_work_below_nothing_is_refused() -> None:
    with pytest.raises(StateError, match="work of a leaf has flops -1"):
        LeafWork(flops=-1.0)
