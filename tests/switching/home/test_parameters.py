"""Parts of buffers: read and written by annotation, and remembered as stale until they are synchronised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.annotations.local import local_part, write_part
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.switching.home.ops import HomeTensor, home_layout
from hetu_fx.switching.home.parameters import Buffers

COLUMNS = Annotation.on((0, 1), Split(0, (2, 1)))
FUSED = Annotation.on((0, 1), Split(0, (2, 1), outer=2, inner=2))  # two blocks of three pairs of rows


@pytest.fixture
def buffers() -> Buffers:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(6))
    return Buffers(model, GroupTable.dry(0, 1))


def test_a_part_of_one_box_is_a_view() -> None:
    whole = torch.arange(6.0)
    part = local_part(whole, COLUMNS, 1)
    assert part.tolist() == [4, 5]
    assert part.data_ptr() == whole[4:].data_ptr()


def test_a_part_of_several_boxes_is_dense() -> None:
    whole = torch.arange(12)
    assert local_part(whole, FUSED, 0).tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert local_part(whole, FUSED, 1).tolist() == [4, 5, 10, 11]


@pytest.mark.parametrize("annotation", [COLUMNS, FUSED, Annotation.on((0, 1), Duplicate(2))])
def test_writing_all_parts_gives_the_whole_back(annotation: Annotation) -> None:
    whole, copy = torch.randn(12, 3), torch.zeros(12, 3)
    for rank in (0, 1):
        write_part(copy, local_part(whole, annotation, rank), annotation, rank)
    assert torch.equal(copy, whole)


def test_a_rank_writes_its_part_only(buffers: Buffers) -> None:
    buffers.write({"mean": torch.ones(4)}, {"mean": COLUMNS})
    assert buffers.model.mean.tolist() == [1, 1, 1, 1, 0, 0]
    assert buffers.read("mean", COLUMNS).tolist() == [1, 1, 1, 1]


def test_a_written_buffer_is_stale_until_it_is_synchronised(buffers: Buffers) -> None:
    assert not buffers._stale
    buffers.write({"mean": torch.ones(6)}, {"mean": Annotation.on((0,))})
    assert buffers._stale
    buffers.sync()
    assert not buffers._stale


def test_a_rank_that_wrote_nothing_knows_what_others_wrote(buffers: Buffers) -> None:
    buffers.write({}, {"mean": COLUMNS})
    assert buffers._stale


def test_a_buffer_that_was_computed_from_home_tensors_becomes_plain(buffers: Buffers) -> None:
    whole = home_layout(Annotation.on((0,)), (6,), 0, 1)
    buffers.model.register_buffer("mask", HomeTensor.from_full(torch.arange(6.0), whole))
    buffers.take_from_first([])
    mask = buffers.model.get_buffer("mask")
    assert type(mask) is torch.Tensor
    assert mask.tolist() == list(range(6))
