"""The bridge on four gloo ranks against a reference: uneven replicas, mixed degrees, zero 0 and 1."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Duplicate, Partial, Sharding, Split
from hetu_fx.annotations.annotation import State as AxisState
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.peers import memory
from hetu_fx.plans.homes import make_home_layouts
from hetu_fx.switching.bridge.bridge import Bridge, BridgeEntry, Reduction
from hetu_fx.switching.home.layout import home_layout
from tests.oracles.annotation_reference import shard
from tests.oracles.annotation_samples import random_annotation, random_cotangent

WORLD = 4
SHAPES = {
    "w": (12, 40),
    "v": (40, 12),
    "fused": (36, 32),
    "bias": (12,),
    "scale": (),
    "big": (48, 50),
    "tall": (600, 4),
}


def stages(*groups: tuple[tuple[int, ...], tuple[AxisState, ...]]) -> tuple[Annotation, Annotation]:
    """Make (compute, gradient) of replicas with their own shardings."""
    device_groups = tuple(DeviceGroup(ranks) for ranks, _ in groups)
    shardings = tuple(Sharding(axes) for _, axes in groups)
    tops = (None, None) if len(groups) == 1 else (Duplicate(len(groups)), Partial(len(groups)))
    return tuple(Annotation(device_groups, shardings, top) for top in tops)  # type: ignore[return-value]


def settings() -> Iterator[tuple[str, dict[str, tuple[Annotation, Annotation]]]]:
    """Yield (name, {parameter: (compute, gradient)})."""
    one = stages(*(((rank,), ()) for rank in range(WORLD)))
    yield "replicas", dict.fromkeys(SHAPES, one)
    yield "some replicas", dict.fromkeys(SHAPES, stages(((3,), ()), ((1,), ())))
    cuts = {"w": (0, 1, 1), "v": (1, 1, 1), "fused": (0, 3, 2), "big": (0, 1, 1)}
    for title, groups in {
        "tensor parallel pairs": ((0, 1), (2, 3)),
        "degrees 2 and 1": ((0, 2), (3,)),
        "degrees 3 and 1": ((0, 1, 2), (3,)),
    }.items():
        table = {}
        for name in SHAPES:
            axes: list[tuple[AxisState, ...]] = []
            for ranks in groups:
                ways = len(ranks)
                if name in cuts and ways > 1:
                    dim, outer, inner = cuts[name]
                    units = (1, 1) if ways == 2 else (2, 1, 1) if name == "big" else (1, 1, 1)
                    axes.append((Split(dim, units, outer, inner),))
                else:
                    axes.append((Duplicate(ways),))
            table[name] = stages(*zip(groups, axes, strict=True))
        if "pairs" in title:
            both = (Duplicate(2),)
            # A gradient that tensor parallelism leaves as summands too, and one that every replica has whole.
            summed = stages(((0, 1), (Partial(2),)), ((2, 3), (Partial(2),)))[1]
            table["bias"] = (stages(((0, 1), both), ((2, 3), both))[0], summed)
            table["scale"] = (table["bias"][0], stages(((0, 1), (Partial(2),)), ((2, 3), (Partial(2),)))[0])
        yield title, table
    columns = stages(((0, 1, 2), (Split(1, (2, 1, 1)),)), ((3,), ()))
    yield "a column alone, from 4 KB on", {name: columns if name == "tall" else one for name in SHAPES}
    yield "one stage each", {name: stages(((i % WORLD,), ())) for i, name in enumerate(SHAPES)}


def value(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + list(SHAPES).index(name))
    return torch.randint(-50, 50, SHAPES[name], generator=generator).to(torch.float64)


def cut(annotation: Annotation, name: str, full: Tensor, rank: int) -> Tensor:
    plain = Annotation(
        annotation.groups,
        tuple(Sharding(tuple(map(whole_of, s.axes))) for s in annotation.shardings),
        whole_of(annotation.top) if annotation.top else None,
    )
    return home_layout(plain, SHAPES[name], rank, WORLD).take(full).contiguous().clone()


def whole_of(state: AxisState) -> AxisState:
    return Duplicate(state.ways) if isinstance(state, Partial) else state


def summand(annotation: Annotation, name: str, rank: int) -> Tensor:
    """Give this rank's gradient: its summand's own values (equal on all that hold the same summand)."""
    number = annotation.region(rank, SHAPES[name]).summand or 0
    return cut(annotation, name, value(name, 7 + number), rank)


def expected_sum(annotation: Annotation, name: str, home: Annotation, rank: int) -> Tensor:
    numbers = {annotation.region(r, SHAPES[name]).summand or 0 for r in annotation.ranks}
    return cut(home, name, sum(value(name, 7 + n) for n in numbers), rank)  # type: ignore[arg-type]


def lowerings() -> Iterator[tuple[str, Lowering]]:
    """Yield the ways in which messages may go: flat, and in two levels of nodes."""
    yield "flat", Lowering()
    for nodes in ("aabb", "aaab", "abab"):
        yield f"nodes {nodes}", Lowering(on_nodes(nodes), "two_level")


def on_nodes(nodes: str, bytes_per_second: float = 1e7) -> Cluster:
    """Put a rank on the node of each letter; nodes are joined by a link of the given speed."""
    inter = Link(bytes_per_second, 1e-6)
    return Cluster.on_paper([1e9] * WORLD, nodes=tuple(nodes), intra=Link(1e9, 1e-6), inter=inter)


def bridges(table: GroupTable, dtype: torch.dtype = torch.float64) -> Iterator[tuple[str, Bridge]]:
    for title, parameters in settings():
        compute = {name: pair[0] for name, pair in parameters.items()}
        homes = {
            "zero 0": make_home_layouts(SHAPES, compute, [1.0] * WORLD, zero=0),
            "zero 1": make_home_layouts(SHAPES, compute, [3.0, 1.0, 2.0, 1.0]),
            "elsewhere": {
                name: Annotation.on((2, 0), Split(0, (1, 3))) if shape else Annotation.on((1,))
                for name, shape in SHAPES.items()
            },
        }
        for where, home in homes.items():
            entries = [BridgeEntry(name, SHAPES[name], dtype, home[name], *parameters[name]) for name in SHAPES]
            for form, lowering in lowerings():
                yield f"{title}, {where}, {form}", Bridge(entries, table, bucket_bytes=10000, lowering=lowering)


def check_values_reach_their_readers(rank: int, world: int, folder: Path) -> None:
    for title, bridge in bridges(GroupTable()):
        entries = bridge.plan.entries
        pieces = {e.name: cut(e.home, e.name, value(e.name, 1), rank) for e in entries}
        found = bridge.gather(pieces)
        assert set(found) == {e.name for e in entries if e.compute.holds(rank)}, title
        for e in entries:
            if e.compute.holds(rank):
                assert torch.equal(found[e.name], cut(e.compute, e.name, value(e.name, 1), rank)), (title, e)


def gradients(bridge: Bridge, rank: int) -> dict[str, Tensor | None]:
    return {e.name: summand(e.gradient, e.name, rank) for e in bridge.plan.entries if e.gradient.holds(rank)}


def check_sums_of_gradients_reach_home(rank: int, world: int, folder: Path) -> None:
    for title, bridge in bridges(GroupTable()):
        found = bridge.reduce(gradients(bridge, rank))
        assert set(found) == set(SHAPES)
        for e in bridge.plan.entries:
            expected = expected_sum(e.gradient, e.name, e.home, rank)
            assert torch.equal(found[e.name], expected), (title, e, found[e.name], expected)


def check_unused_parameters_get_zeros(rank: int, world: int, folder: Path) -> None:
    for title, bridge in bridges(GroupTable()):
        given = gradients(bridge, rank)
        if rank % 2:
            given = {name: None for name in given}
        found = bridge.reduce(given)
        for e in bridge.plan.entries:
            assert found[e.name].shape == home_layout(e.home, e.shape, rank, WORLD).local_shape, title
        zeros = bridge.reduce({})
        assert not any(zero.any() for zero in zeros.values()), title


def check_gradients_may_come_one_by_one(rank: int, world: int, folder: Path) -> None:
    for title, bridge in bridges(GroupTable()):
        reduction = Reduction(bridge, SHAPES)
        given = gradients(bridge, rank)
        for name in reversed(SHAPES):
            if name != "v":
                reduction.ready(name, given.get(name))
        found = reduction.finish()
        for e in bridge.plan.entries:
            expected = expected_sum(e.gradient, e.name, e.home, rank) * (e.name != "v")
            assert torch.equal(found[e.name], expected), (title, e)


def check_what_was_waited_for_early_is_still_given(rank: int, world: int, folder: Path) -> None:
    for title, bridge in bridges(GroupTable()):
        reduction = Reduction(bridge, SHAPES)
        given = gradients(bridge, rank)
        for name in SHAPES:
            reduction.ready(name, given.get(name))
        reduction.settle()
        found = reduction.finish()
        for e in bridge.plan.entries:
            assert torch.equal(found[e.name], expected_sum(e.gradient, e.name, e.home, rank)), (title, e)


def check_values_are_cast_on_the_way(rank: int, world: int, folder: Path) -> None:
    for title, bridge in bridges(GroupTable(), torch.bfloat16):
        pieces = {e.name: cut(e.home, e.name, value(e.name, 1), rank).float() for e in bridge.plan.entries}
        for name, tensor in bridge.gather(pieces).items():
            assert tensor.dtype == torch.bfloat16, (title, name)


def check_random_annotations(rank: int, world: int, folder: Path) -> None:
    random, numbers = Random(0), np.random.default_rng(0)
    for case in range(60):
        shape = random.choice([(12, 6), (24,), (4, 6, 3)])
        home, compute = (random_annotation(random, range(WORLD), shape, partial=False) for _ in range(2))
        gradient = random_cotangent(random, compute)
        bridge = Bridge([BridgeEntry("w", shape, torch.float64, home, compute, gradient)], GroupTable())
        full = numbers.integers(-50, 50, shape).astype(np.float64)
        summands = shard(full, gradient, partial(numbers.integers, -50, 50))
        at_home, read = shard(full, home), shard(full, compute)
        given = {"w": torch.from_numpy(summands[rank]).clone()} if rank in summands else {}
        found = bridge.reduce(given)["w"]
        if rank in at_home:
            assert np.array_equal(found.numpy(), at_home[rank]), (case, home, gradient)
        pieces = {"w": torch.from_numpy(at_home[rank]).clone()} if rank in at_home else {}
        values = bridge.gather(pieces)
        assert set(values) == ({"w"} if rank in read else set())
        if rank in read:
            assert np.array_equal(values["w"].numpy(), read[rank]), (case, home, compute)


def check_ranks_that_read_each_others_memory_bring_the_same(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "LEAST_BYTES", 0)
        for check in (
            check_values_reach_their_readers,
            check_sums_of_gradients_reach_home,
            check_unused_parameters_get_zeros,
            check_gradients_may_come_one_by_one,
            check_random_annotations,
        ):
            check(rank, world, folder)


def check_copies_are_written_where_the_last_ones_stand(rank: int, world: int, folder: Path) -> None:
    for title, bridge in bridges(GroupTable()):
        entries = bridge.plan.entries
        pieces = {e.name: cut(e.home, e.name, value(e.name, 1), rank) for e in entries}
        copies = bridge.gather(pieces)
        known = {name: copy.data_ptr() for name, copy in copies.items()}
        again = bridge.gather({name: piece + 1 for name, piece in pieces.items()}, copies)
        for e in entries:
            if e.compute.holds(rank):
                assert torch.equal(again[e.name], cut(e.compute, e.name, value(e.name, 1) + 1, rank)), (title, e)
        shared = {piece.data_ptr() for piece in pieces.values()}
        moved = {name for run in bridge.plan.gathers for name in run.moved}
        kept = {name: place for name, place in known.items() if place not in shared and name not in moved}
        assert {name: again[name].data_ptr() for name in kept} == kept, title


def check_two_levels_meet_inside_nodes_and_in_lanes_and_where_the_price_says_so(
    rank: int, world: int, folder: Path
) -> None:
    one = stages(*(((r,), ()) for r in range(WORLD)))
    levels = {ranks for ranks in ((0, 1), (2, 3), (0, 2), (1, 3)) if rank in ranks}
    slow, fast = on_nodes("aabb"), on_nodes("aabb", 1e9)
    cases = [
        (Lowering(slow, "two_level"), levels),
        (Lowering(slow, "flat"), set()),
        (Lowering(slow), levels),
        (Lowering(fast), set()),
    ]
    for zero in (0, 1):
        home = make_home_layouts(SHAPES, dict.fromkeys(SHAPES, one[0]), [1.0] * WORLD, zero)
        entries = [BridgeEntry(name, SHAPES[name], torch.float64, home[name], *one) for name in SHAPES]
        for lowering, expected in cases:
            table = GroupTable()
            bridge = Bridge(entries, table, lowering=lowering)
            bridge.gather(bridge.reduce(gradients(bridge, rank)))
            assert {created.ranks for created in table.creations} == expected, (zero, lowering.choice)


def check_a_bucket_starts_without_waiting_for_its_peers(rank: int, world: int, folder: Path) -> None:
    """Rank 0 tells the others to start only when it has started all its buckets, as it may in its backward."""
    import torch.distributed as dist

    one = stages(*(((r,), ()) for r in range(WORLD)))
    home = make_home_layouts(SHAPES, dict.fromkeys(SHAPES, one[0]), [1.0] * WORLD)
    entries = [BridgeEntry(name, SHAPES[name], torch.float64, home[name], *one) for name in SHAPES]
    for form, lowering in lowerings():
        bridge = Bridge(entries, GroupTable(), bucket_bytes=5000, lowering=lowering)
        expected = bridge.reduce(gradients(bridge, rank))  # creates the groups, which is collective
        reduction = Reduction(bridge, SHAPES)
        if rank:
            dist.recv(torch.empty(1), src=0)
        for name, gradient in gradients(bridge, rank).items():
            reduction.ready(name, gradient)
        reduction.start()
        if rank == 0:
            for other in range(1, WORLD):
                dist.send(torch.zeros(1), dst=other)
        found = reduction.finish()
        assert all(torch.equal(found[name], expected[name]) for name in SHAPES), form


def check_the_bridge_works_inside_a_smaller_world(rank: int, world: int, folder: Path) -> None:
    import torch.distributed as dist

    group = dist.new_group([1, 3])
    if rank in (1, 3):
        table = GroupTable(group)
        both = Annotation.on((0, 1), Duplicate(2))
        e = BridgeEntry(
            "w",
            (6,),
            torch.float64,
            Annotation.on((0, 1), Split(0, (1, 2))),
            both,
            Annotation.on((0, 1), Partial(2)),
        )
        bridge = Bridge([e], table)
        found = bridge.reduce({"w": torch.arange(6.0).double() * (rank + 1)})["w"]
        assert torch.equal(found, torch.arange(6.0).double()[[slice(0, 2), slice(2, 6)][table.rank]] * 6)
        assert torch.equal(bridge.gather({"w": found})["w"], torch.arange(6.0).double() * 6)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_four_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
