"""Memory that another process maps: it sees what is written, and only where it is the right one."""

from __future__ import annotations

import os

import pytest

from hetu_fx.comm_ops.wire.peers.system import SharedMemory, map_remote_memory, shared_memory


def test_what_is_written_is_seen_where_it_is_mapped() -> None:
    own = SharedMemory(100)
    other = map_remote_memory(os.getpid(), own.place)
    assert other is not None
    own.memory[10:15] = b"hello"
    assert other[10:15] == b"hello"
    with pytest.raises(TypeError):
        other[0:1] = b"x"


def test_it_stays_for_those_that_have_mapped_it_once_it_is_closed() -> None:
    own = SharedMemory(100)
    other = map_remote_memory(os.getpid(), own.place)
    own.close()
    own.memory[0:2] = b"ab"
    assert other is not None
    assert other[0:2] == b"ab"
    assert map_remote_memory(os.getpid(), own.place) is None


def test_another_files_memory_is_not_taken_for_it() -> None:
    one, other = SharedMemory(100), SharedMemory(100)
    assert map_remote_memory(os.getpid(), one.place._replace(file=other.place.file)) is None
    assert map_remote_memory(os.getpid(), one.place._replace(num_bytes=5000)) is None
    assert map_remote_memory(2**22 + os.getpid(), one.place) is None


def test_where_there_is_none_to_be_had_its_file_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    def full(file: int, size: int) -> None:
        closed.append(file)
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(OSError, match="no space"):
        SharedMemory(100)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(closed[0])


def test_where_the_system_has_none_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert shared_memory(100) is None
