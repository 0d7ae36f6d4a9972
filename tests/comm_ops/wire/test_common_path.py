"""How long ranks wait for one that is elsewhere: asked, else told by the environment, else a minute."""

from __future__ import annotations

import math

import pytest

from hetu_fx.comm_ops.wire.common_path import VARIABLE, WAIT_SECONDS, patience
from hetu_fx.errors import EnvironmentProblem


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_what_is_asked_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience(None) == WAIT_SECONDS
    monkeypatch.setenv(VARIABLE, "7.5")
    assert patience(None) == 7.5
    assert patience(3.0) == 3.0
    monkeypatch.setenv(VARIABLE, "inf")
    assert patience(None) == math.inf


@pytest.mark.parametrize("told", ["soon", "0", "-1", "nan"])
def test_what_is_no_number_of_seconds_is_refused(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, told)
    with pytest.raises(EnvironmentProblem, match=f"{VARIABLE} is '{told}'"):
        patience(None)


def test_an_argument_that_cannot_be_is_refused() -> None:
    with pytest.raises(EnvironmentProblem, match="wait_seconds is 0"):
        patience(0)
