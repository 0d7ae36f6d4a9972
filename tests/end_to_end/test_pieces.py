"""Pieces of ranks make whole tensors, and copies that differ are told."""

from __future__ import annotations

import pytest
import torch

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.states import Split
from hetu_fx.errors import DivergedError
from hetu_fx.lockstep import RankShard, join_pieces
from hetu_fx.switching.home.layout import home_layout

WHOLE = torch.arange(12.0).view(4, 3)


def pieces(annotation: Annotation, world: int = 3) -> list[dict[str, RankShard]]:
    layouts = [home_layout(annotation, (4, 3), rank, world) for rank in range(world)]
    return [{"w": RankShard(layout.take(WHOLE).clone(), layout)} for layout in layouts]


def test_parts_and_copies_make_the_whole() -> None:
    for annotation in (Annotation.on((0, 2), Split(0, (1, 1))), Annotation.replicated((0, 1, 2))):
        assert torch.equal(join_pieces(pieces(annotation))["w"], WHOLE)


def test_a_copy_that_differs_is_told_with_its_rank() -> None:
    ranks = pieces(Annotation.replicated((0, 1, 2)))
    ranks[1]["w"].local[0, 0] += 1.0  # rank 0 counts it
    with pytest.raises(DivergedError, match="rank 1 has another copy of 'w' than the rank that counts it"):
        join_pieces(ranks)


def test_plain_tensors_are_the_same_on_all_ranks() -> None:
    plain = [{"b": RankShard(torch.ones(2), None)}, {"b": RankShard(torch.ones(2), None)}]
    assert torch.equal(join_pieces(plain)["b"], torch.ones(2))
    plain[1]["b"].local.add_(1e-6)  # by other sums
    assert torch.equal(join_pieces(plain)["b"], torch.ones(2))
    plain[1]["b"].local.add_(1e-4)
    with pytest.raises(DivergedError, match="rank 1"):
        join_pieces(plain)
    plain[1]["b"].local.add_(1.0)
    with pytest.raises(DivergedError, match="rank 1"):
        join_pieces(plain)
