"""Group tables: a world of one, dry runs, and what they refuse."""

import threading

import pytest
import torch

from hetu_fx.comm_ops.wire import groups
from hetu_fx.comm_ops.wire.groups import GroupTable, activate, active, guarded, using
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import CommError


def test_without_torch_distributed_the_world_is_one():
    table = GroupTable()
    assert (table.rank, table.size, table.to_global(0)) == (0, 1, 0)
    assert active().size == 1
    assert table.position([0]) == 0


def test_a_dry_table_knows_its_place_but_sends_nothing():
    table = GroupTable.dry(3, 8)
    assert table.position([5, 3]) == 1
    with pytest.raises(CommError, match="rank 3 of 8 cannot communicate"):
        table.group([3, 5])


def test_the_activated_table_is_the_one_in_use():
    table = GroupTable.dry(1, 2)
    before = activate(table)
    assert active() is table
    with using(GroupTable.dry(0, 2)) as inner:
        assert active() is inner
    assert active() is table
    activate(before)


def test_a_table_of_a_thread_is_active_in_that_thread_alone():
    table, beside, found = GroupTable.dry(1, 2), GroupTable.dry(1, 2), []
    beside.pauses_work = False

    def work():
        with using(beside):
            with using(beside):
                found.append(active())
            found.append(active())
        found.append(active())

    with using(table):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert active() is table
    assert [one is beside for one in found] == [True, True, False]
    assert found[2] is table


def test_positions_are_ordered_as_the_group_counts_them():
    assert GroupTable.dry(0, 8).order([5, 1, 3]) == [1, 2, 0]


def test_torchs_errors_become_ours():
    with pytest.raises(CommError, match=r"all-reduce of ranks \[0, 1\] failed on rank 0: timed out"):
        with guarded("all-reduce", [0, 1]):
            raise RuntimeError("timed out")


class Work:
    """Counts the pauses that last."""

    def __init__(self):
        self.pauses = 0

    def pause(self):
        self.pauses += 1

    def resume(self):
        self.pauses -= 1


@pytest.fixture
def work():
    work = Work()
    groups.set_working(work)
    yield work
    groups.set_working(None)


def test_a_wait_inside_another_is_told_first(monkeypatch):
    now = iter((0.0, 1.0, 3.0, 10.0))
    monkeypatch.setattr(groups, "perf_counter", lambda: next(now))
    table, told = GroupTable.dry(0, 2), []
    table.listener = lambda *event: told.append(event)
    with using(table), guarded("all-reduce", [0, 1]), guarded("group creation", [0, 1]):
        pass
    assert told == [("group creation", 1.0, 3.0), ("all-reduce", 0.0, 10.0)]


def test_who_waits_does_not_work(work):
    with using(GroupTable.dry(0, 2)), guarded("all-reduce", [0, 1]):
        assert work.pauses == 1
    assert work.pauses == 0


def test_work_goes_on_after_a_wait_that_fails(work):
    with using(GroupTable.dry(0, 2)), pytest.raises(CommError), guarded("all-reduce", [0, 1]):
        raise RuntimeError("timed out")
    assert work.pauses == 0


def test_work_goes_on_while_another_thread_waits(work):
    table = GroupTable.dry(0, 2)
    table.pauses_work = False  # as that of a table beside it
    with guarded("all-reduce", [0, 1], table):
        assert work.pauses == 0


def test_another_ranks_communication_is_refused():
    with pytest.raises(CommError, match=r"ranks \[1, 2\], which leave it out"):
        GroupTable().position([1, 2])


def test_a_rank_that_is_not_there_is_told_of() -> None:
    with pytest.raises(CommError, match=r"rank 1 is not one of 1\nhint: start the job with torchrun"):
        GroupTable().to_global(1)


def test_host_tensors_are_not_staged():
    assert not GroupTable().is_staged(torch.device("cpu"))


def test_a_dry_table_has_no_other_beside_it():
    with pytest.raises(CommError, match="cannot communicate"):
        GroupTable.dry(0, 2).beside("levels")


def test_ranks_of_which_no_type_is_known_are_taken_to_be_alike():
    def ask(table: GroupTable) -> list[bool]:
        first, last = GroupTable.dry(0, 4), GroupTable.dry(3, 4)
        GroupTable.dry(0, 2).know_types(["cpu", "cuda"])  # told among two of the four
        return [first.is_mixed, last.is_mixed]

    assert run_in_threads(1, ask) == [[True, False]]
