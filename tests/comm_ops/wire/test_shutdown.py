"""Connections of groups are ended, other sockets are left alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from hetu_fx.comm_ops.wire.shutdown import opening_connections, remember, sever


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server
    sever()  # nothing is remembered for the next test


def test_whoever_waits_for_a_message_hears_the_end(listener: socket.socket) -> None:
    with opening_connections():
        near = socket.create_connection(listener.getsockname(), timeout=30)
        far, _ = listener.accept()
    far.settimeout(30)
    with near, far:
        assert sever() == 2
        assert (near.recv(1), far.recv(1)) == (b"", b"")


def test_connections_that_are_just_being_opened_are_ended_too(listener: socket.socket) -> None:
    with opening_connections(), socket.create_connection(listener.getsockname(), timeout=30) as near:
        assert sever() == 1
        assert near.recv(1) == b""


def test_other_connections_go_on(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname(), timeout=30) as near:
        with opening_connections():
            inside, outside = socket.socketpair()  # local ones are no group's
        far, _ = listener.accept()
        with far, inside, outside:
            assert sever() == 0
            far.sendall(b"x")
            inside.sendall(b"y")
            assert (near.recv(1), outside.recv(1)) == (b"x", b"y")


def test_what_listens_goes_on() -> None:
    with opening_connections():
        server = socket.create_server(("127.0.0.1", 0))
    with server:
        assert sever() == 0
        with socket.create_connection(server.getsockname(), timeout=30):
            server.accept()[0].close()


class FakeNccl:
    """What torch.distributed asks of NCCL's backend when it is ended."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def _group_start(self) -> None:
        self.told.append("start")

    def _group_end(self) -> None:
        self.told.append("end")

    def abort(self) -> None:
        self.told.append("abort")


class FakeGloo(FakeNccl):
    pass


class FakeGroup:
    def __init__(self, told: list[str]) -> None:
        self.backends = {"cuda": FakeNccl(told), "cpu": FakeGloo(told)}

    def _get_backend(self, device: Any) -> FakeNccl:
        return self.backends[device.type]


def test_backends_of_devices_are_aborted_once_in_one_call_and_gloo_is_not() -> None:
    told: list[str] = []
    groups: list[Any] = [FakeGroup(told), FakeGroup(told)]
    for group in groups:
        remember(group)
    sever()
    sever()
    assert told == ["start", "abort", "abort", "end"]
