"""Warnings name a line of the user's: of the script that calls in, or of the forward."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.utils._pytree import tree_map

from hetu_fx.base.user_warnings import warn_user


def test_a_warning_names_the_innermost_line_that_is_neither_ours_nor_torchs() -> None:
    def here(text: str) -> None:
        warn_user(text)

    with pytest.warns(UserWarning, match="rows meet") as told:
        tree_map(here, ["rows meet"])
    assert (Path(told[0].filename), told[0].lineno) == (Path(__file__), here.__code__.co_firstlineno + 1)


def test_a_warning_of_a_line_of_the_forward_names_that() -> None:
    with pytest.warns(DeprecationWarning, match="no rule") as told:
        warn_user("no rule", DeprecationWarning, ("model.py", 41))
    assert (told[0].filename, told[0].lineno) == ("model.py", 41)


def test_the_same_place_is_told_of_once() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for line in (41, 41, 42):
            warn_user("no rule", at=("model.py", line))
    assert [one.lineno for one in told] == [41, 42]


def test_of_what_is_the_same_on_all_ranks_rank_0_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rank in range(3):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            warn_user(f"rank {rank}", same_on_all_ranks=True)
            warn_user(f"rank {rank} alone")
    assert [str(one.message) for one in told] == ["rank 0", "rank 0 alone", "rank 1 alone", "rank 2 alone"]
