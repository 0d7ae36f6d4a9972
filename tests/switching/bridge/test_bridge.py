"""The bridge on paper, and on a world of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Duplicate, Partial, Sharding, Split
from hetu_fx.comm_ops.plans.routes import RouteKind
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import AnnotationError, StateError
from hetu_fx.switching.bridge.bridge import Bridge, BridgeEntry, Reduction, plan_bridge
from hetu_fx.switching.bridge.bridge_plan import taken_once
from hetu_fx.switching.bridge.compute import Compute
from hetu_fx.switching.home.ops import HomeTensor, home_layout

COPIES = Annotation.on((0, 1, 2), Duplicate(3))
SUMMANDS = Annotation.on((0, 1, 2), Partial(3))
ROWS = Annotation.on((0, 1, 2), Split(0, (2, 1, 1)))


def entry(name: str, home: Annotation, compute: Annotation = COPIES, gradient: Annotation = SUMMANDS) -> BridgeEntry:
    return BridgeEntry(name, (8, 6), torch.float32, home, compute, gradient)


def pairs(*groups: tuple[tuple[int, ...], Sharding], top: Duplicate | Partial) -> Annotation:
    return Annotation(tuple(DeviceGroup(ranks) for ranks, _ in groups), tuple(s for _, s in groups), top)


def test_equal_replicas_with_copies_at_home_only_sum() -> None:
    plan = plan_bridge([entry("w", COPIES)])
    assert plan.gathers[0].messages == ()
    (message,) = plan.reduces[0].messages
    assert (message.lane.kind, message.lane.ranks) == (RouteKind.SUM, (0, 1, 2))


def test_equal_replicas_owning_once_scatter_and_gather() -> None:
    plan = plan_bridge([entry("w", ROWS), entry("b", Annotation.on((1,)))])
    (scatter,), (gather,) = plan.reduces[0].messages, plan.gathers[0].messages
    assert (scatter.lane.kind, scatter.sizes) == (RouteKind.SCATTER, (24, 12 + 48, 12))
    assert (gather.lane.kind, gather.sizes) == (RouteKind.GATHER, (24, 12 + 48, 12))


def test_a_gradient_that_each_replica_has_whole_is_taken_from_one_where_copies_are_updated() -> None:
    half = Sharding((Split(0, (1, 1)),))
    both = pairs(((0, 1), half), ((2,), Sharding()), top=Duplicate(2))
    assert taken_once(both, both, (8, 6)) == Annotation.on((0, 1), Split(0, (1, 1)))
    assert taken_once(both, COPIES, (8, 6)) == Annotation.on((0, 1), Split(0, (1, 1)))
    assert taken_once(both, ROWS, (8, 6)) == both
    summands = pairs(((0, 1), half), ((2,), Sharding()), top=Partial(2))
    assert taken_once(summands, both, (8, 6)) == summands


def test_tensor_parallel_replicas_sum_within_those_that_read_the_same() -> None:
    half = Sharding((Split(0, (1, 1)),))
    compute = pairs(((0, 1), half), ((2, 3), half), top=Duplicate(2))
    gradient = pairs(((0, 1), half), ((2, 3), half), top=Partial(2))
    plan = plan_bridge([entry("w", compute, compute, gradient)])
    assert [message.lane.ranks for message in plan.reduces[0].messages] == [(0, 2), (1, 3)]


def test_unequal_degrees_sum_by_slices() -> None:
    half = Sharding((Split(0, (1, 1)),))
    compute = pairs(((0, 1), half), ((2,), Sharding()), top=Duplicate(2))
    gradient = pairs(((0, 1), half), ((2,), Sharding()), top=Partial(2))
    plan = plan_bridge([entry("w", compute, compute, gradient)])
    assert [message.lane.ranks for message in plan.reduces[0].messages] == [(0, 2), (1, 2)]


def test_a_duplicated_summand_counts_once() -> None:
    both = Sharding((Duplicate(2),))
    compute = pairs(((0, 1), both), ((2,), Sharding()), top=Duplicate(2))
    gradient = pairs(((0, 1), both), ((2,), Sharding()), top=Partial(2))
    (message,) = plan_bridge([entry("w", compute, compute, gradient)]).reduces[0].messages
    assert (message.lane.ranks, message.lane.givers) == ((0, 1, 2), (0, 2))


def test_a_home_that_nobody_there_reads_is_moved() -> None:
    plan = plan_bridge([entry("w", Annotation.on((3,)))])
    assert plan.gathers[0].moved == plan.reduces[0].moved == ("w",)


def test_buckets_are_cut_by_size_and_reduces_run_backwards() -> None:
    plan = plan_bridge([entry(name, COPIES) for name in "abcd"], bucket_bytes=2 * 8 * 6 * 4)
    assert [bucket.names for bucket in plan.reduces] == [("d", "c"), ("b", "a")]


def test_wrong_entries_are_refused() -> None:
    with pytest.raises(StateError, match=r"'w'.*more than once"):
        plan_bridge([entry("w", COPIES), entry("w", COPIES)])
    with pytest.raises(AnnotationError, match="cannot have summands"):
        entry("w", SUMMANDS)


def test_alone_everything_is_shared_and_misfits_are_refused() -> None:
    alone = Annotation.on((0,))
    bridge = Bridge([entry("w", alone, alone, alone)], GroupTable())
    piece = torch.randn(8, 6)
    assert bridge.gather({"w": piece})["w"].data_ptr() == piece.data_ptr()
    assert bridge.reduce({"w": piece})["w"].data_ptr() == piece.data_ptr()
    assert torch.equal(bridge.reduce({})["w"], torch.zeros(8, 6))
    with pytest.raises(StateError, match="none was given"):
        bridge.gather({})
    with pytest.raises(StateError, match=r"in shape \(8, 6\), got \(6, 8\)"):
        bridge.gather({"w": piece.t()})


def test_gradients_that_stay_are_taken_as_they_are_and_those_of_others_are_empty() -> None:
    here, there = Annotation.on((0,)), Annotation.on((1,))
    entries = [entry("mine", here, here, here), entry("theirs", there, there, there)]
    bridge, gradient = Bridge(entries, GroupTable.dry(0, 2)), torch.randn(8, 6)
    first, again = (bridge.reduce({"mine": given}) for given in (gradient, None))
    assert first["mine"] is gradient
    assert torch.equal(again["mine"], torch.zeros(8, 6))
    assert first["theirs"].shape == home_layout(there, (8, 6), 0, 2).local_shape
    assert again["theirs"] is first["theirs"]


def test_what_is_shared_is_gathered_once_and_again_only_when_a_piece_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, gathered, by = Annotation.on((0,)), [], Bridge.gather

    def counted(self: Bridge, *given: Any) -> Any:
        gathered.append(given)
        return by(self, *given)

    monkeypatch.setattr(Bridge, "gather", counted)
    layout = home_layout(alone, (8, 6), 0, 1)
    home: Any = torch.nn.Parameter(HomeTensor(torch.randn(8, 6), layout))
    bridge, compute = Bridge([entry("w", alone, alone, alone)], GroupTable()), Compute(GroupTable(), {"w": home})
    first = compute.gather(bridge)["w"]
    with torch.no_grad():
        home.add_(1.0)
    assert torch.equal(compute.gather(bridge)["w"], home.to_local())
    assert (len(gathered), first.data_ptr()) == (1, home.to_local().data_ptr())
    home.data = torch.zeros(8, 6)
    assert torch.equal(compute.gather(bridge)["w"], torch.zeros(8, 6))
    home.data = home.data.double()
    assert compute.gather(bridge)["w"].dtype is torch.float32
    with torch.no_grad():
        home.add_(1.0)
    assert torch.equal(compute.gather(bridge)["w"], torch.ones(8, 6))
    assert len(gathered) == 4


@pytest.mark.parametrize("most", [None, 2])
def test_a_reduction_lets_buckets_go_while_others_come_where_it_is_bounded(most: int | None) -> None:
    names = [f"w{number}" for number in range(6)]
    gradients = {name: torch.randn(8, 6, dtype=torch.float64) for name in names}
    under_way: list[list[int]] = []

    def rank(table: GroupTable) -> dict[str, torch.Tensor]:
        both, rows = Annotation.on((0, 1), Duplicate(2)), Annotation.on((0, 1), Split(0, (1, 3)))
        entries = [BridgeEntry(n, (8, 6), torch.float64, rows, both, Annotation.on((0, 1), Partial(2))) for n in names]
        bridge = Bridge(entries, table, bucket_bytes=1)
        reduction, seen = Reduction(bridge, set(names), most), list[int]()
        under_way.append(seen)
        for name in reversed(names):
            reduction.ready(name, (table.rank + 1) * gradients[name])
            seen.append(len(reduction._under_way))
        return reduction.finish()

    first, second = run_in_threads(2, rank)
    assert [max(seen) for seen in under_way] == [most or 6] * 2
    for name in names:
        assert torch.equal(torch.cat([first[name], second[name]]), gradients[name] + 2 * gradients[name])


def test_what_is_not_trained_has_no_gradient_that_travels() -> None:
    plan = plan_bridge([entry("w", ROWS), replace(entry("v", ROWS), trained=False)])
    assert [bucket.names for bucket in plan.gathers] == [("w", "v")]
    assert [bucket.names for bucket in plan.reduces] == [("w",)]


def test_parameters_of_units_travel_in_buckets_of_their_own() -> None:
    entries = [BridgeEntry(f"w{n}", (8, 6), torch.float32, ROWS, COPIES, SUMMANDS, unit=n // 2) for n in range(4)]
    plan = plan_bridge(entries)
    assert [(bucket.unit, bucket.names) for bucket in plan.gathers] == [(0, ("w0", "w1")), (1, ("w2", "w3"))]
    assert [(bucket.unit, bucket.names) for bucket in plan.reduces] == [(1, ("w3", "w2")), (0, ("w1", "w0"))]
