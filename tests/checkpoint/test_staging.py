"""What is handed over to a save that goes on while training does."""

from __future__ import annotations

import torch

from hetu_fx import PartsStager
from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.switching.home.ops import HomeTensor, home_layout


def _part(rank: int) -> HomeTensor:
    layout = home_layout(Annotation.on((0, 1), Split(0, (3, 1))), (8, 2), rank, 2)
    return HomeTensor.from_full(torch.arange(16.0).reshape(8, 2), layout)


def test_a_rank_copies_its_part_and_asks_no_other() -> None:
    given = _part(1)
    staged = PartsStager().stage({"model": {"weight": given}})["model"]["weight"]
    assert type(staged) is HomeTensor
    assert staged.shape == (8, 2)
    assert staged.local.untyped_storage().nbytes() == 4 * 4  # two rows of eight
    given.local.zero_()
    assert staged.local.tolist() == [[12, 13], [14, 15]]


def test_plain_tensors_and_settings_are_copied_too() -> None:
    given = {"step": torch.ones(()), "groups": [{"lr": 0.1, "names": ["a"]}]}
    staged = PartsStager().stage(given)
    given["step"].zero_()
    given["groups"][0]["names"].append("b")
    assert staged["step"] == 1
    assert staged["groups"] == [{"lr": 0.1, "names": ["a"]}]
