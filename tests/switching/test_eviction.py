"""What variants that do not run may keep: the decision alone, and what carries it out on one rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.errors import StateError
from hetu_fx.plans.plan import Pipeline, Plan, Schedule, Stage
from hetu_fx.switching.bridge.compute import compute_layout
from hetu_fx.switching.eviction import Eviction, IdleLayout, evictions

LAYOUTS = st.lists(st.builds(IdleLayout, st.integers(0, 9), st.integers(0, 50), st.integers(0, 50)), max_size=6)


def left(idle: list[IdleLayout], gone: tuple[Eviction, ...]) -> int:
    sizes = {("copies", i): one.copy_bytes for i, one in enumerate(idle)}
    sizes |= {("graphs", i): one.graph_bytes for i, one in enumerate(idle)}
    return sum(sizes.values()) - sum(sizes[part, index] for index, part in gone)


@given(LAYOUTS, st.integers(0, 300))
def test_what_is_left_fits_and_all_that_is_evicted_had_to_be(idle: list[IdleLayout], limit: int) -> None:
    found = evictions(idle, limit)
    assert left(idle, found) <= limit
    assert not found or left(idle, found[:-1]) > limit
    assert len(set(found)) == len(found)


def test_copies_go_before_graphs_and_what_was_used_longest_ago_goes_first() -> None:
    idle = [IdleLayout(last_use=7, copy_bytes=10, graph_bytes=5), IdleLayout(3, 10, 5), IdleLayout(5, 10, 5)]
    order = [("copies", 1), ("copies", 2), ("copies", 0), ("graphs", 1), ("graphs", 2), ("graphs", 0)]
    assert [(part, index) for index, part in evictions(idle, 0)] == order
    assert [(part, index) for index, part in evictions(idle, 14)] == order[:4]
    assert evictions(idle, 45) == ()


def test_what_takes_nothing_is_not_evicted() -> None:
    assert evictions([IdleLayout(0, 0, 0), IdleLayout(1, 0, 8)], 0) == ((1, "graphs"),)


def test_sizes_are_not_negative() -> None:
    with pytest.raises(StateError, match="idle layout has copy_bytes -1\nhint: give a finite number, 0 or more"):
        IdleLayout(0, -1, 0)


def pair(*, rows: tuple[int, int] = (1, 1), micro_batches: int = 1, **options: object) -> Plan:
    pipelines = (Pipeline((Stage((rank,)),), rows, micro_batches) for rank, rows in enumerate(rows))
    return Plan(tuple(pipelines), **options)  # type: ignore[arg-type]


def staged(schedule: Schedule, chunks: int = 0) -> Plan:
    return Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=4),), schedule=schedule, chunks=chunks)


def test_plans_have_one_compute_layout_if_they_differ_in_rows_names_and_lengths_alone() -> None:
    assert compute_layout(pair()) == compute_layout(pair(rows=(3, 1), name="other", max_length=9, zero=0))
    assert compute_layout(pair(micro_batches=2)) == compute_layout(pair(micro_batches=5, schedule="gpipe"))
    one_of_them = Plan((Pipeline((Stage((0,)),), micro_batches=3), Pipeline((Stage((1,)),))))
    assert compute_layout(one_of_them) == compute_layout(pair(micro_batches=2))


def test_plans_of_other_stages_or_with_several_micro_batches_have_other_layouts() -> None:
    plans = [
        pair(),
        pair(micro_batches=2),
        Plan((Pipeline((Stage((0,), recompute=0),)), Pipeline((Stage((2,)),)))),
        Plan.tensor_parallel((0, 1)),
        Plan.tensor_parallel((0, 1), (2, 1)),
        staged("1f1b"),
        staged("zero-bubble"),
        staged("interleaved"),
        staged("interleaved", chunks=3),
        staged("zero-bubble", chunks=2),
    ]
    assert len(set(map(compute_layout, plans))) == len(plans)
