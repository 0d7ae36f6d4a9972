"""Rooms in memory that ranks share: whose they are, and for how long."""

from __future__ import annotations

import os
import platform
import sys

import pytest
import torch

from hetu_fx.comm_ops.wire.peers import rooms
from hetu_fx.comm_ops.wire.peers.rooms import Area, area, is_room, mapped_areas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without names")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Area:
    monkeypatch.setattr(rooms, "BOARD_BYTES", 1 << 12)
    monkeypatch.setattr(rooms, "AREA_BYTES", (1 << 12) + (1 << 16))
    return Area()


def test_a_room_is_nobody_else_s_until_it_is_dropped(own: Area) -> None:
    first, second = own.room(5000), own.room(5000)
    assert first is not None
    assert second is not None
    assert abs(first.start - second.start) >= 5000
    start = first.start
    del first
    again = own.room(4097)
    assert again is not None
    assert again.start == start


def test_a_large_room_is_not_taken_for_little(own: Area) -> None:
    large = own.room(5 * 4096)
    assert large is not None
    del large
    small, large = own.room(4096), own.room(5 * 4096)
    assert small is not None
    assert large is not None
    assert (large.start, small.start) == (4096, 6 * 4096)


def test_there_is_no_room_beyond_the_area(own: Area) -> None:
    kept = [own.room(1 << 14) for _ in range(4)]
    assert None not in kept
    assert own.room(1) is None


def test_there_is_no_room_for_too_much_at_once(own: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MOST_ROOM_BYTES", 5000)
    assert own.room(5001) is None
    assert own.room(5000) is not None


def test_what_is_written_in_a_room_is_seen_by_who_has_mapped_it(own: Area) -> None:
    (mapped,) = mapped_areas({3: (os.getpid(), own.file)}).values()
    own.close()
    own.room(100)
    room = own.room(400)
    assert room is not None
    assert is_room(room.address)
    room.tensor([2, 50], torch.float32).copy_(torch.arange(100.0).view(2, 50))
    assert torch.equal(mapped.seen(room.address, 40, torch.empty(7)), torch.arange(10.0, 17.0))


def test_an_area_that_cannot_be_opened_is_left_out(own: Area) -> None:
    number = own.file
    own.close()
    assert mapped_areas({0: (os.getpid(), number)}) == {}


def test_there_is_no_area_where_the_system_or_the_processor_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "aarch64")
        assert area() is None
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert area() is not None
    monkeypatch.delattr(os, "memfd_create")
    assert area() is None
