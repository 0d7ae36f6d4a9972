"""A library newer than what was tested is told once, by one rank, and is no error."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import metadata
from typing import Any

import pytest

from hetu_fx.base import tested
from hetu_fx.base.tested import NEWEST, above_tested, numbers, upper_bound, warn_of_newer


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("2.11.0", ""),
        ("2.14.1", ""),
        ("2.14.1+cpu", ""),
        ("2.15.0", "2.14"),
        ("3.0.0a0", "2.14"),
        ("2.15.0.dev1", "2.14"),
    ],
)
def test_a_later_release_is_above_the_newest_tested(version: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "NEWEST", {"torch": "2.14"})
    assert above_tested("torch", version) == told
    assert above_tested("numpy", version) == ""


def test_the_installed_torch_is_a_tested_one() -> None:
    assert above_tested("torch", metadata.version("torch")) == ""
    assert numbers(NEWEST["torch"]) < numbers(upper_bound(NEWEST["torch"]))


def test_rank_0_warns_and_says_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "NEWEST", {"torch": "2.9"})
    monkeypatch.delenv("RANK", raising=False)
    with pytest.warns(UserWarning, match=r"torch up to 2\.9(.|\n)*hint: .*pip install 'torch<2\.10'"):
        warn_of_newer()
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_newer()


def test_a_library_that_is_not_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_newer()


def test_the_warning_comes_at_import() -> None:
    lines = ("import importlib, hetu_fx", "hetu_fx.base.tested.NEWEST['torch'] = '1.0'", "importlib.reload(hetu_fx)")
    code = "\n".join(lines)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "tested with torch up to 1.0" in ended.stderr
