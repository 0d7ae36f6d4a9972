"""Snapshots of three ranks on two nodes: what is lost with a node, what another layout reads, what cannot be kept."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.checkpoint.snapshot_files import SnapshotMemory, SnapshotMoment, SnapshotPart, read_name
from hetu_fx.checkpoint.snapshots import SnapshotWriter, find_snapshot
from hetu_fx.checkpoint.tensor_files import Key, RankShards
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import CheckpointError
from hetu_fx.switching.home.ops import HomeTensor, gather_whole, home_layout

WORLD = 3
SHAPES = {"rows": (10, 6), "fused": (12, 5), "copies": (6, 4)}
LAYOUTS = {
    3: {
        "rows": Annotation.on((2, 0, 1), Split(0, (7, 0, 3))),
        "fused": Annotation.on((0, 1), Split(0, (1, 3), outer=3)),
        "copies": Annotation.on((0, 1, 2), Duplicate(3)),
    },
    2: {
        "rows": Annotation.on((0, 1), Split(1, (1, 2))),
        "fused": Annotation.on((1, 0), Split(0, (1, 1), outer=2, inner=3)),
        "copies": Annotation.on((1,)),
    },
}


def homes(rank: int, world: int, fill: float | None = None) -> dict[str, Tensor]:
    made = {}
    for number, (name, annotation) in enumerate(LAYOUTS[world].items()):
        whole = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(number))
        whole = whole if fill is None else torch.full(SHAPES[name], fill)
        made[name] = nn.Parameter(HomeTensor.from_full(whole, home_layout(annotation, SHAPES[name], rank, world)))
    return {**made, "buffer": torch.arange(3.0) if fill is None else torch.full((3,), fill)}


def named(tensors: Mapping[str, Tensor]) -> Iterator[tuple[Key, Tensor]]:
    return (((name, ""), tensor) for name, tensor in tensors.items())


def on_node(rank: int, folder: Path) -> SnapshotMemory:
    """Stand on node a (rank 0) or b (ranks 1 and 2)."""
    os.environ["HETU_FX_NODE"] = "abb"[rank]
    return SnapshotMemory.at(folder)


def lose_node(node: str, folder: Path, rank: int) -> None:
    dist.barrier()
    if rank == 0:
        for path in (folder / node).iterdir():
            path.unlink()
    dist.barrier()


def assert_found(memory: SnapshotMemory, table: GroupTable, step: int) -> None:
    tensors = homes(table.rank, table.size, fill=-1.0)
    with using(table):
        _, found = find_snapshot(memory, table, tensors)
        assert found is not None
        assert found.moment.step == step
        assert [document["rank"] for document in found.documents] == [0, 1, 2]
        with torch.no_grad():
            for name, tensor in tensors.items():
                found.boxes.fill((name, ""), tensor)
        right = homes(table.rank, table.size)
        assert torch.equal(tensors["buffer"], right["buffer"])
        for name in SHAPES:
            assert torch.equal(*gather_whole([tensors[name], right[name]]))  # type: ignore[list-item]


def check_what_a_node_takes_with_it_the_other_has(rank: int, world: int, folder: Path) -> None:
    for lost in "ab":
        memory, table = on_node(rank, folder / lost), GroupTable()
        writer = SnapshotWriter(memory, table)
        for step in (1, 2):
            writer.write(step, named(homes(rank, world)), {"rank": rank})
        writer.wait()
        assert writer.last is not None
        assert {part.moment.step for part in memory.parts() if part.holder == rank} == {2}
        lose_node(lost, folder / lost, rank)
        assert_found(memory, table, 2)


def check_fewer_ranks_in_another_layout_read_it(rank: int, world: int, folder: Path) -> None:
    memory = on_node(rank, folder / "fewer")
    writer = SnapshotWriter(memory, GroupTable())
    writer.write(5, named(homes(rank, world)), {"rank": rank})
    writer.wait()
    lose_node("a", folder / "fewer", rank)
    group = dist.new_group([0, 2])
    if rank != 1:
        assert_found(memory, GroupTable(group), 5)


def check_with_part_and_copy_gone_it_is_said_what_is_lost(rank: int, world: int, folder: Path) -> None:
    memory, table = on_node(rank, folder / "lost"), GroupTable()
    writer = SnapshotWriter(memory, table)
    writer.write(1, named(homes(rank, world)), {})
    writer.wait()
    dist.barrier()
    for part in memory.parts():
        if part.owner == 1:
            memory.path(part).unlink(missing_ok=True)
    dist.barrier()
    choice, found = find_snapshot(memory, table, homes(rank, world))
    assert found is None
    assert choice.lost == ((writer.last, (1,)),)


def check_one_that_cannot_be_kept_leaves_the_one_before(rank: int, world: int, folder: Path) -> None:
    memory, table = on_node(rank, folder / "full"), GroupTable()
    writer = SnapshotWriter(memory, table)
    writer.write(1, named(homes(rank, world)), {"rank": rank})
    writer.wait()
    if rank == 2:
        # What a full memory does, at the moment of writing.
        writer.memory = FullMemory(memory.folder)
    writer.write(2, named(homes(rank, world)), {"rank": rank})
    writer.wait()
    assert writer.last is not None
    assert writer.last.step == 1
    assert_found(memory, table, 1)


def check_a_copy_that_cannot_be_kept_leaves_the_one_before_and_nothing_else(
    rank: int, world: int, folder: Path
) -> None:
    memory = on_node(rank, folder / "copies")
    writer = SnapshotWriter(memory, GroupTable())
    layout = home_layout(Annotation.on((0,)), (300, 300), rank, world)  # more than may be in a file on other ranks
    tensors = {"large": HomeTensor.from_full(torch.ones(300, 300), layout)}
    for step, last in ((1, 1), (2, 1), (3, 1), (4, 4)):
        with small_files(1 << 16) if rank and last < step else nullcontext():
            writer.write(step, named(tensors), {})
            writer.wait()
        assert writer.last is not None
        assert writer.last.step == last
        dist.barrier()
        found = [read_name(path.name) for path in memory.folder.iterdir()]
        assert {part and part.moment.step for part in found} == {last}
        dist.barrier()


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Have no larger files: whoever makes room for one is refused, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class FullMemory(SnapshotMemory):
    def write(self, *_: Any) -> int:
        raise CheckpointError("no space left on device")


def check_a_new_life_takes_the_place_of_the_one_before(rank: int, world: int, folder: Path) -> None:
    memory, table = on_node(rank, folder / "lives"), GroupTable()
    for step in (7, 3):
        writer = SnapshotWriter(memory, table)
        writer.write(step, named(homes(rank, world)), {"rank": rank})
        writer.wait()
        dist.barrier()
    assert_found(memory, table, 3)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)


def test_what_is_half_written_is_no_part_and_what_is_foreign_stays(tmp_path: Path) -> None:
    memory = SnapshotMemory.at(tmp_path)
    part = SnapshotPart(SnapshotMoment(1, "a0", 1), 0, 0)
    room = memory.allocate_part(part, 5)
    room.copy_(torch.frombuffer(bytearray(b"half "), dtype=torch.uint8))
    (beside,) = memory.folder.iterdir()
    (beside / ".tmpXXXXXX").write_bytes(b"torn")  # as safetensors names what it has not written to its end
    (memory.folder / "notes.txt").write_text("of the user")
    assert memory.parts() == ()
    memory.remove_unfinished()
    assert [path.name for path in memory.folder.iterdir()] == ["notes.txt"]


def test_who_removes_the_last_part_removes_the_folder_also_for_ranks_that_have_none(tmp_path: Path) -> None:
    memory = SnapshotMemory.at(tmp_path / "job")
    memory.write(SnapshotPart(SnapshotMoment(1, "a0", 2), 0, 0), RankShards(), {})
    memory.remove(1)
    assert len(memory.parts()) == 1
    memory.remove(0)
    memory.remove(1)
    assert [*tmp_path.iterdir()] == []


def test_a_part_of_one_rank_has_plain_tensors_on_rank_0_only() -> None:
    assert len(RankShards.of(named({"buffer": torch.zeros(2)}), 0).tensors) == 1
    assert RankShards.of(named({"buffer": torch.zeros(2)}), 1).tensors == {}
