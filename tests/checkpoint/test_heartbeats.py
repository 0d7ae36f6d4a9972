"""A process that gives no sign of life is found and ended; one that has left, or whose watcher was away, is not."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore

from hetu_fx.base.machine import start_time
from hetu_fx.checkpoint.heartbeats import LEFT, HeartbeatAges, Heartbeats, Peer, ranks_watched_by, watch_each_other
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError

BOUND = 0.2


@pytest.fixture
def silent() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that never gives a sign."""
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        process.kill()


def test_only_new_signs_break_a_silence() -> None:
    silences = HeartbeatAges((1, 2, 3, 4))
    for number in range(3):
        silences.hear({1: str(number), 2: "7", 3: LEFT}, 1.0)
    assert silences.longer_than(1.5) == (2, 4)  # 4 has never given one
    assert silences.longer_than(2.5) == (4,)


@pytest.mark.parametrize(
    ("nodes", "watched"),
    [("aa", [(1,), (0,)]), ("ab", [(1,), (0,)]), ("aabb", [(1,), (0, 2), (3,), (0, 2)]), ("a", [()])],
)
def test_everyone_watches_its_node_and_the_next_rank(nodes: str, watched: list[tuple[int, ...]]) -> None:
    assert [ranks_watched_by(rank, nodes) for rank in range(len(nodes))] == watched


OWN = Peer("here", os.getpid(), start_time(os.getpid()))


def peer_of(process: int) -> Peer:
    return Peer("here", process, start_time(process))


def test_a_process_is_not_taken_for_another_one_of_its_number(silent: subprocess.Popen[bytes]) -> None:
    other = replace(peer_of(silent.pid), started=1)
    gone = replace(OWN, process=2**22 + 1)  # above the system's highest
    assert other.opened() is None
    assert gone.opened() is None
    Heartbeats(HashStore(), 0, [OWN, other, gone], BOUND).close()


def test_a_silent_process_of_this_node_is_ended(silent: subprocess.Popen[bytes]) -> None:
    beats = Heartbeats(HashStore(), 0, [OWN, peer_of(silent.pid)], BOUND)
    try:
        assert silent.wait(timeout=120) == -signal.SIGKILL
    finally:
        beats.close()


def test_what_another_has_found_holds_for_all(silent: subprocess.Popen[bytes]) -> None:
    store = HashStore()
    store.set("lost", "1")
    store.set("beat/1", LEFT)  # to this one it is not silent
    beats = Heartbeats(store, 0, [OWN, peer_of(silent.pid)], BOUND)
    try:
        assert silent.wait(timeout=120) == -signal.SIGKILL
    finally:
        beats.close()


def test_who_has_closed_has_left() -> None:
    store = HashStore()
    Heartbeats(store, 0, [OWN], BOUND).close()
    assert store.get("beat/0").decode() == LEFT


def test_nobody_is_watched_where_there_is_nobody_else() -> None:
    assert watch_each_other(GroupTable.dry(0, 1), BOUND) is None


def test_a_bound_that_cannot_be_is_refused() -> None:
    with pytest.raises(StateError, match="stopped_after=0 must be above 0 seconds"):
        watch_each_other(GroupTable.dry(0, 1), 0.0)
