"""Checkpoints written by three ranks, read by three (another layout), by two and by one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from hetu_fx.checkpoint.summed_files import SummedWriter
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import HetuFxError
from hetu_fx.switching.home.ops import HomeTensor, gather_whole, home_layout

WORLD = 3
SHAPES = {"rows": (10, 6), "fused": (12, 5), "alone": (7,), "scale": (), "copies": (6, 4)}
LAYOUTS = {
    3: {
        "rows": Annotation.on((2, 0, 1), Split(0, (7, 0, 3))),
        "fused": Annotation.on((0, 1), Split(0, (1, 3), outer=3)),
        "alone": Annotation.on((1,)),
        "scale": Annotation.on((2,)),
        "copies": Annotation.on((0, 1, 2), Duplicate(3)),
    },
    2: {
        "rows": Annotation.on((0, 1), Split(1, (1, 2))),
        "fused": Annotation.on((1, 0), Split(0, (1, 1), outer=2, inner=3)),
        "alone": Annotation.on((0, 1), Split(0, (3, 4))),
        "scale": Annotation.on((0, 1), Duplicate(2)),
        "copies": Annotation.on((1,)),
    },
    1: dict.fromkeys(SHAPES, Annotation.on((0,))),
}


def value(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 10 + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def homes(table: GroupTable, world: int, seed: int) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(
            HomeTensor.from_full(value(name, seed), home_layout(annotation, SHAPES[name], table.rank, world))
        )
        for name, annotation in LAYOUTS[world].items()
    }


def step(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    for name, parameter in parameters.items():
        grad = value(name, seed)
        layout = getattr(parameter, "home_layout", None)
        parameter.grad = grad if layout is None else HomeTensor.from_full(grad, layout)
    optimizer.step()


def check_any_number_of_ranks_goes_on_exactly(rank: int, world: int, folder: Path) -> None:
    table = GroupTable()
    parameters = homes(table, WORLD, 0)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    step(parameters, optimizer, 1)
    tensors = {**parameters, "buffer": torch.arange(3.0), "tied": parameters["rows"]}
    save_checkpoint(
        folder / "saved", tensors, aliases={"tied": "rows"}, max_shard_size=400,
        optimizer=optimizer, parameters=parameters, extra={"step": 1}, table=table,
    )  # fmt: skip
    step(parameters, optimizer, 2)
    expected = gather_whole(list(parameters.values()))
    groups = {3: dist.group.WORLD, 2: dist.new_group([0, 2]), 1: dist.new_group([1])}
    for readers, group in groups.items():
        if rank in dist.get_process_group_ranks(group):
            with using(GroupTable(group)) as smaller:
                _go_on(folder / "saved", smaller, readers, expected)


def _go_on(folder: Path, table: GroupTable, world: int, expected: list[Tensor]) -> None:
    parameters = homes(table, world, 5)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.7)
    buffer = torch.zeros(3)
    load_checkpoint(folder, {**parameters, "buffer": buffer}, verify=True, table=table)
    assert load_checkpoint(folder, {}, optimizer=optimizer, parameters=parameters, table=table) == {"step": 1}
    assert torch.equal(buffer, torch.arange(3.0))
    step(parameters, optimizer, 2)
    for found, wanted in zip(gather_whole(list(parameters.values())), expected, strict=True):
        assert torch.equal(found, wanted)


def check_plain_tensors_read_what_ranks_wrote(rank: int, world: int, folder: Path) -> None:
    target = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    load_checkpoint(folder / "saved", {**target, "buffer": torch.zeros(3)}, table=GroupTable())
    moved = homes(GroupTable(), WORLD, 3)
    load_checkpoint(folder / "saved", {**moved, "buffer": torch.zeros(3)}, table=GroupTable())
    for found, wanted in zip(gather_whole(list(moved.values())), target.values(), strict=True):
        assert torch.equal(found, wanted)


def check_an_error_on_one_rank_is_raised_on_all(rank: int, world: int, folder: Path) -> None:
    parameters = homes(GroupTable(), WORLD, 0)

    def fail(_: Path) -> None:
        raise ValueError("only rank 0 gets here")

    with pytest.raises(HetuFxError, match="only rank 0 gets here"):
        save_checkpoint(folder / "failed", parameters, write_config=fail, table=GroupTable())
    assert not (folder / "failed").exists()
    if rank == 1:
        parameters["rows"].data = parameters["rows"].data.float()
    with pytest.raises(HetuFxError, match="do not fit"):
        load_checkpoint(folder / "saved", {**parameters, "buffer": torch.zeros(3)}, table=GroupTable())


def check_files_are_written_by_ranks_in_turn_a_tensor_at_a_time(rank: int, world: int, folder: Path) -> None:
    begun: list[str] = []
    alive: list[int] = []
    wholes: list[weakref.ref[Tensor]] = []
    begin, write = SummedWriter.begin, SummedWriter.write

    def noted(writer: SummedWriter) -> SummedWriter:
        begun.append(writer.path.name)
        return begin(writer)

    def counted(writer: SummedWriter, tensor: Tensor) -> None:
        alive.append(sum(known() is not None for known in wholes))
        wholes.append(weakref.ref(tensor))
        write(writer, tensor)

    parameters = homes(GroupTable(), WORLD, 0)
    with mock.patch.object(SummedWriter, "begin", noted), mock.patch.object(SummedWriter, "write", counted):
        save_checkpoint(folder / "turns", parameters, max_shard_size=250, table=GroupTable())
    files = sorted(path.name for path in (folder / "turns").glob("*.safetensors"))
    assert len(files) == 4
    assert begun == files[rank::WORLD]
    assert not any(alive)
    found = {name: tensor for file in files for name, tensor in load_file(folder / "turns" / file).items()}
    assert all(torch.equal(found[name], value(name, 0)) for name in SHAPES)


def check_a_file_that_one_rank_cannot_write_is_an_error_on_all(rank: int, world: int, folder: Path) -> None:
    write = SummedWriter.write

    def failing(writer: SummedWriter, tensor: Tensor) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        write(writer, tensor)

    with (
        mock.patch.object(SummedWriter, "write", failing),
        pytest.raises(HetuFxError, match="No space left on device"),
    ):
        save_checkpoint(folder / "full", homes(GroupTable(), WORLD, 0), max_shard_size=250, table=GroupTable())
    assert not (folder / "full").exists()


def check_a_lost_rank_file_is_noticed(rank: int, world: int, folder: Path) -> None:
    table = GroupTable()
    parameters = homes(table, WORLD, 0)
    optimizer = torch.optim.AdamW(parameters.values())
    dist.barrier()
    if rank == 0:
        (folder / "saved" / "hetu_fx" / "training_state-00001.safetensors").unlink()
    dist.barrier()
    with pytest.raises(HetuFxError, match=r"training_state-00001\.safetensors is missing"):
        load_checkpoint(folder / "saved", {}, optimizer=optimizer, parameters=parameters, table=table)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
