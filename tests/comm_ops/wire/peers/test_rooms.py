"""Rooms in memory that ranks share: whose they are, and for how long."""

from __future__ import annotations

import mmap
import os
import platform

import pytest
import torch

from hetu_fx.comm_ops.wire.peers import rooms
from hetu_fx.comm_ops.wire.peers.rooms import SharedPool, area_bytes, behind, is_room, view_remote
from hetu_fx.comm_ops.wire.peers.system import SharedMemory, map_remote_memory

BOARD_BYTES, AREA_BYTES = 96, 1 << 16


@pytest.fixture
def own() -> SharedPool:
    return SharedPool(behind(mmap.mmap(-1, AREA_BYTES), 0))


def test_a_room_is_nobody_else_s_until_it_is_dropped(own: SharedPool) -> None:
    first, second = own.room(5000), own.room(5000)
    assert first is not None
    assert second is not None
    assert abs(first.start - second.start) >= 5000
    start = first.start
    del first
    again = own.room(4097)
    assert again is not None
    assert again.start == start


def test_a_large_room_is_not_taken_for_little(own: SharedPool) -> None:
    large = own.room(5 * 4096)
    assert large is not None
    del large
    small, large = own.room(4096), own.room(5 * 4096)
    assert small is not None
    assert large is not None
    assert (large.start, small.start) == (0, 5 * 4096)


def test_there_is_no_room_beyond_the_area(own: SharedPool) -> None:
    kept = [own.room(1 << 14) for _ in range(4)]
    assert None not in kept
    assert own.room(1) is None


def test_there_is_no_room_for_too_much_at_once(own: SharedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MOST_ROOM_BYTES", 5000)
    assert own.room(5001) is None
    assert own.room(5000) is not None


def test_what_is_written_in_a_room_is_seen_by_who_has_mapped_it() -> None:
    shared = SharedMemory(BOARD_BYTES + AREA_BYTES)
    own, memory = (
        SharedPool(behind(shared.memory, BOARD_BYTES)),
        map_remote_memory(os.getpid(), shared.place, for_tensors=True),
    )
    shared.close()
    assert memory is not None
    own.room(100)
    room = own.room(400)
    assert room is not None
    assert is_room(room.address)
    room.tensor([2, 50], torch.float32).copy_(torch.arange(100.0).view(2, 50))
    other = behind(memory, BOARD_BYTES)
    assert torch.equal(view_remote(other, room.address, 40, torch.empty(7)), torch.arange(10.0, 17.0))


def test_there_is_no_area_where_the_processor_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert area_bytes() == 0
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert area_bytes() == rooms.AREA_BYTES
