"""Environment variables that the user's code reads are found, and random numbers that a forward draws are refused."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from hetu_fx.errors import CaptureError
from hetu_fx.program.code_reads import Surroundings

NAME = "HETU_FX_TEST_SCALE"


@pytest.mark.parametrize(
    "read",
    [lambda: os.environ[NAME], lambda: os.environ.get(NAME), lambda: os.getenv(NAME), lambda: NAME in os.environ],
    ids=["item", "get", "getenv", "in"],
)
def test_a_variable_that_the_users_code_reads_is_found(read: Callable[[], Any], monkeypatch: Any) -> None:
    surroundings = Surroundings()
    monkeypatch.setenv(NAME, "1")
    with surroundings.watching():
        read()
    found = surroundings.found[NAME]
    assert found.value == "1"
    monkeypatch.setenv(NAME, "2")
    assert found.value == "2"


def test_what_libraries_read_is_not() -> None:
    surroundings = Surroundings()
    with surroundings.watching():
        exec(compile("os.environ.get('HOME')", numpy.__file__, "exec"))
    assert surroundings.found == {}


@pytest.mark.parametrize(
    ("draw", "name"), [(random.random, "random"), (numpy.random.rand, "numpy.random")], ids=["python", "numpy"]
)
def test_random_numbers_that_are_no_torchs_are_refused(draw: Callable[[], Any], name: str) -> None:
    surroundings = Surroundings()
    with surroundings.watching():
        draw()
    with pytest.raises(CaptureError, match=f"draws random numbers of {name}, which"):
        surroundings.check()


def test_a_forward_that_draws_none_is_not() -> None:
    surroundings = Surroundings()
    with surroundings.watching():
        random.Random(0).random()
    surroundings.check()


def test_what_the_users_code_prints_is_written_and_told_with_its_line(capsys: Any) -> None:
    surroundings = Surroundings()
    with surroundings.watching():
        print("seen")
    print("not told")
    assert capsys.readouterr().out == "seen\nnot told\n"
    assert list(surroundings.ran_once) == [line for line in surroundings.ran_once if "test_surroundings.py:" in line]
    assert "the forward prints" in surroundings.told
    assert not Surroundings().told


def test_a_breakpoint_stops_and_is_told(monkeypatch: Any) -> None:
    stopped: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(1))
    surroundings = Surroundings()
    with surroundings.watching():
        breakpoint()
    assert stopped == [1]
    assert "test_surroundings.py:" in surroundings.told
