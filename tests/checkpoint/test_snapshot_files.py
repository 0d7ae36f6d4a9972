"""Who keeps whose copy, and which snapshot counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.checkpoint.snapshot_files import (
    PartTransfer,
    SnapshotMoment,
    SnapshotPart,
    choose,
    holders,
    plan_transfers,
    read_name,
)

OLD, NEW = SnapshotMoment(8, "a0", 2), SnapshotMoment(9, "a0", 2)


def parts(moment: SnapshotMoment, *owners: int) -> list[SnapshotPart]:
    return [SnapshotPart(moment, owner, owner) for owner in owners]


def test_on_one_node_the_next_rank_keeps_the_copy() -> None:
    assert holders(["a"] * 3) == (1, 2, 0)


def test_who_is_alone_has_no_copy() -> None:
    assert holders(["a"]) == (None,)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12))
def test_copies_stand_on_other_nodes_and_are_shared_out_evenly(nodes: list[str]) -> None:
    chosen = holders(nodes)
    for rank, holder in enumerate(chosen):
        assert holder is not None
        assert holder != rank
        assert len(set(nodes)) == 1 or nodes[holder] != nodes[rank]
    for node in set(nodes):
        kept = [chosen.count(rank) for rank in range(len(nodes)) if nodes[rank] == node]
        assert max(kept) - min(kept) <= 1 + len(nodes) // 2


def test_a_file_is_found_again_by_its_name() -> None:
    part = SnapshotPart(SnapshotMoment(12, "0f", 3), 2, 0)
    assert read_name(part.file_name) == part
    assert read_name(f".writing-{part.file_name}") is None


def test_the_newest_step_that_all_ranks_have_finished_counts() -> None:
    found = choose({"a": parts(OLD, 0, 1) + parts(NEW, 0)})
    assert found.moment == OLD
    assert found.lost == ((NEW, (1,)),)


def test_a_copy_stands_in_for_a_part_that_is_gone() -> None:
    found = choose({"a": [*parts(NEW, 0), SnapshotPart(NEW, 1, 0)]})
    assert (found.moment, found.nodes, found.lost) == (NEW, (("a",), ("a",)), ())


def test_parts_of_two_lives_of_the_job_are_not_mixed() -> None:
    other = SnapshotMoment(9, "b1", 2)
    assert choose({"a": parts(NEW, 0) + parts(other, 1)}).moment is None


def test_without_any_part_nothing_is_lost() -> None:
    assert choose({"a": []}).lost == ()


def test_a_node_gets_the_parts_that_its_ranks_need_and_no_others() -> None:
    choice = choose({"a": parts(NEW, 0, 1), "b": []})
    assert plan_transfers(choice, ["a", "b", "b"], [(0, 1), (1,), (1,)]) == (PartTransfer(1, 0, 1),)


@pytest.mark.parametrize("needs", [[(0,), (1,)], [(), ()]])
def test_nothing_travels_that_is_there(needs: list[tuple[int, ...]]) -> None:
    choice = choose({"a": parts(NEW, 0), "b": parts(NEW, 1)})
    assert plan_transfers(choice, ["a", "b"], needs) == ()
