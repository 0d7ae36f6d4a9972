import pytest

from hetu_fx.planner.memory import UNBOUNDED, activation_bytes, fixed_bytes, in_flight, most_rows


def test_1f1b_keeps_fewer_micro_batches_towards_the_end() -> None:
    assert [in_flight("1f1b", stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight("1f1b", 0, 4, 2) == 2
    assert [in_flight("gpipe", stage, 4, 8) for stage in range(4)] == [8, 8, 8, 8]


@pytest.mark.parametrize(("zero", "num_replicas", "optimizer"), [(0, 1, 200), (0, 4, 200), (1, 1, 200), (1, 4, 75)])
def test_zero_spreads_states_over_replicas(zero: int, num_replicas: int, optimizer: int) -> None:
    terms = dict(fixed_bytes(100.0, zero=zero, num_replicas=num_replicas))
    assert terms == {"parameters": 100, "gradients": 100, "optimizer": optimizer}


def test_most_rows_fill_what_is_left() -> None:
    rows = most_rows(1000, 400, 50, 3)
    assert rows == 4
    assert 400 + activation_bytes(50, rows, 3) <= 1000 < 400 + activation_bytes(50, rows + 1, 3)
    assert most_rows(100, 101, 1, 1) == 0
    assert most_rows(100, 100, 0, 1) == UNBOUNDED
