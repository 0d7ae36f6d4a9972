import gc

import pytest

from hetu_fx.base.memory import MOST_KEPT, Log, without_collections


def test_no_garbage_is_looked_for_inside_and_afterwards_as_before() -> None:
    with without_collections():
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), without_collections():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_log_gives_what_came_later_so_far_as_it_is_kept() -> None:
    log: Log[int] = Log()
    for number in range(5000):
        log.note(number)
    assert log.since(4998) == [4998, 4999]
    assert log.since(5000) == []
    assert len(log.since(0)) == len(list(log)) == MOST_KEPT < log.count
