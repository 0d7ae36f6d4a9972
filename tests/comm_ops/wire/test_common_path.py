"""How long ranks wait for one that is elsewhere: as asked, else as the environment says; and what ends their waits."""

from __future__ import annotations

import math
import threading

import pytest
import torch.distributed as dist

from hetu_fx.comm_ops.wire.common_path import VARIABLE, WAIT_SECONDS, CommonPath, patience
from hetu_fx.comm_ops.wire.standings import RankStatus
from hetu_fx.errors import CommError, EnvironmentProblem


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


class CutOff(dist.Store):
    """A store that answers until it is cut off, and then nobody until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self._store = threading.Event(), dist.HashStore()
        self.answers.set()

    def set(self, key: str, value: str) -> None:
        self.answers.wait()
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        self.answers.wait()
        return bool(self._store.check(keys))

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))


def test_a_rank_that_asks_a_store_that_is_cut_off_ends_when_communication_is_ended_and_tells_nobody() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = CutOff()
    try:
        path = CommonPath(dist.group.WORLD, store, 60.0)
        store.answers.clear()
        threading.Timer(0.2, path.cut, ["a machine is lost"]).start()
        with pytest.raises(CommError, match="communication has been ended: a machine is lost"):
            path.explain("a sum")
        path.finish()
    finally:
        store.answers.set()
        dist.destroy_process_group()


def test_a_rank_that_leaves_tells_the_others_why_and_waits_for_a_store_that_is_cut_off_until_it_learns_so() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    heard, cut_off = CutOff(), CutOff()
    try:
        CommonPath(dist.group.WORLD, heard, 60.0).leave("an error")
        assert (status := RankStatus.read(heard.get("at/0").decode())) is not None
        assert status.left == "an error"
        path = CommonPath(dist.group.WORLD, cut_off, 60.0)
        cut_off.answers.clear()
        threading.Timer(0.2, path.cut, ["a machine is lost"]).start()
        path.leave("an error")
        assert path._thread.is_alive()
    finally:
        cut_off.answers.set()
        dist.destroy_process_group()
