"""Ranks that are asked answer in threads: bytes arrive where they are wanted, refusals and ends are told."""

from __future__ import annotations

import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest
import torch

from hetu_fx.comm_ops.wire import one_sided
from hetu_fx.comm_ops.wire.one_sided import MOST_STRANGERS, Caller, Listener, Question, ReadRefusal
from hetu_fx.errors import CommError, StateError


def numbers(question: Question) -> torch.Tensor:
    if question["count"] < 0:
        raise StateError("less than nothing")
    return torch.arange(question["count"], dtype=torch.float64).view(torch.uint8)


def test_bytes_arrive_where_they_are_wanted() -> None:
    listener = Listener(numbers)
    caller = Caller([listener.address], 10)
    found = torch.empty(2, 3, dtype=torch.float64)
    for _ in range(2):
        caller.ask(0, {"count": 6}, found)
        assert found.tolist() == [[0, 1, 2], [3, 4, 5]]
    caller.ask(0, {"count": 0})
    caller.close()
    listener.close()


def test_a_refusal_says_why_and_the_next_question_is_answered() -> None:
    listener = Listener(numbers)
    caller = Caller([listener.address], 10)
    found = torch.empty(1, dtype=torch.float64)
    with pytest.raises(ReadRefusal, match="StateError: less than nothing"):
        caller.ask(0, {"count": -1}, found)
    with pytest.raises(ReadRefusal, match="16 bytes instead of 8"):
        caller.ask(0, {"count": 2}, found)
    caller.ask(0, {"count": 1}, found)
    listener.close()


def test_who_does_not_know_the_secret_is_not_answered() -> None:
    listener = Listener(numbers)
    stranger = Caller([replace(listener.address, secret=bytes(32))], 10)
    with pytest.raises(CommError, match="is not that rank"):
        stranger.ask(0, {"count": 1}, torch.empty(1, dtype=torch.float64))
    listener.close()


def test_a_listener_that_does_not_know_the_secret_is_not_believed_and_does_not_hear_it() -> None:
    heard = list[bytes]()

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(32))
            heard.append(connection.recv(1024))
            connection.sendall(bytes(32))

    with listening() as address, socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=pretend, args=(other,), daemon=True).start()
        fooled = Caller([replace(address, port=other.getsockname()[1])], 10)
        with pytest.raises(CommError, match="does not know the secret"):
            fooled.ask(0, {"count": 1})
    assert address.secret not in heard[0]


@contextmanager
def listening() -> Iterator[one_sided.Address]:
    listener = Listener(numbers)
    yield listener.address
    listener.close()


def ask(address: one_sided.Address, count: int = 3) -> list[float]:
    found = torch.empty(count, dtype=torch.float64)
    caller = Caller([address], 10)
    caller.ask(0, {"count": count}, found)
    caller.close()
    return found.tolist()


def test_strangers_take_no_thread_and_hold_nobody_up() -> None:
    with listening() as address, ExitStack() as idle:
        before = threading.active_count()
        for _ in range(10 * MOST_STRANGERS):
            idle.enter_context(socket.create_connection((address.host, address.port), timeout=5))
        assert ask(address) == [0, 1, 2]
        assert threading.active_count() <= before + 1


def test_the_oldest_stranger_makes_room() -> None:
    with listening() as address, ExitStack() as idle:
        first, *_ = [
            idle.enter_context(socket.create_connection((address.host, address.port), timeout=30))
            for _ in range(MOST_STRANGERS + 1)
        ]
        assert len(first.recv(32, socket.MSG_WAITALL)) == 32  # what it is to answer
        assert first.recv(1) == b""


def test_who_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided, "SHOW_SECONDS", 0.1)
    with listening() as address, socket.create_connection((address.host, address.port), timeout=30) as idle:
        assert len(idle.recv(32, socket.MSG_WAITALL)) == 32
        assert idle.recv(1) == b""


def test_a_listener_is_bound_to_one_address() -> None:
    with listening() as address:
        assert address.host == "127.0.0.1"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", address.port), timeout=5)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open nothing more in the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as held, socket.socket() as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 1, before[1]))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        with suppress(OSError):
            while True:
                held.enter_context(socket.socket())
        yield


def test_a_listener_survives_that_no_file_descriptor_is_left() -> None:
    with listening() as address, socket.socket() as early:
        with no_descriptor_left():
            early.connect((address.host, address.port))  # the kernel takes it; the listener cannot yet
            time.sleep(2 * one_sided.RETRY_SECONDS)
        assert ask(address) == [0, 1, 2]


def test_a_question_of_absurd_length_ends_the_connection_alone() -> None:
    with listening() as address:
        with one_sided._connect(address) as connection:
            connection.sendall(struct.pack("!I", 2**32 - 1))
            connection.settimeout(30)
            assert connection.recv(1) == b""
        assert ask(address) == [0, 1, 2]


def test_a_question_that_is_no_json_is_refused_and_the_next_is_answered() -> None:
    with listening() as address, one_sided._connect(address) as connection:
        for text in (b"[" * 200_000, b"{}}", b"\xff"):
            connection.sendall(struct.pack("!I", len(text)) + text)
            is_answer, size = struct.unpack("!?Q", connection.recv(9, socket.MSG_WAITALL))
            assert not is_answer
            assert b"Error" in connection.recv(size, socket.MSG_WAITALL)
        assert ask(address) == [0, 1, 2]


def test_no_more_ranks_are_served_than_there_are() -> None:
    listener = Listener(numbers, most=1)
    with one_sided._connect(listener.address), pytest.raises(CommError, match="does not answer"):
        ask(listener.address)
    listener.close()


def test_a_rank_that_has_ended_is_told_at_once() -> None:
    asked = threading.Event()
    never = threading.Event()

    def silent(question: Question) -> torch.Tensor:
        asked.set()
        never.wait(30)
        return torch.empty(0, dtype=torch.uint8)

    listener = Listener(silent)
    address = listener.address
    threading.Thread(target=lambda: (asked.wait(10), listener.close())).start()
    for _ in range(2):  # while it is asked, and once it is gone
        with pytest.raises(CommError, match="rank 0 does not answer"):
            Caller([address], 20).ask(0, {})
    never.set()


def test_a_rank_that_does_not_answer_is_waited_for_no_longer_than_told() -> None:
    never = threading.Event()
    listener = Listener(lambda question: (never.wait(30), torch.empty(0, dtype=torch.uint8))[1])
    with pytest.raises(CommError, match="timed out"):
        Caller([listener.address], 0.05).ask(0, {})
    never.set()
    listener.close()


def test_a_listener_that_is_closed_waits_for_the_answer_that_is_being_given() -> None:
    asked, answered = threading.Event(), threading.Event()

    def slow(question: Question) -> torch.Tensor:
        asked.set()
        time.sleep(0.3)
        answered.set()
        return torch.empty(0, dtype=torch.uint8)

    listener = Listener(slow)
    caller = Caller([listener.address], 10)
    asking = threading.Thread(target=lambda: _ask_in_vain(caller))
    asking.start()
    assert asked.wait(10)
    listener.close()
    assert answered.is_set()
    asking.join(10)
    assert not [one for one in threading.enumerate() if one.name == "hetu_fx answers"]


def _ask_in_vain(caller: Caller) -> None:
    with suppress(CommError):
        caller.ask(0, {})


def test_a_listener_that_is_closed_while_it_takes_a_connection_waits_for_that_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener, ended = Listener(numbers), list[None]()
    start, closing = threading.Thread.start, threading.Thread(target=lambda: ended.append(listener.close()))

    def late(thread: threading.Thread) -> None:
        if thread.name == "hetu_fx answers":  # that of the connection is there, and has not started
            start(closing)
            closing.join(0.1)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", late)
    caller = Caller([listener.address], 10)
    with suppress(CommError):
        caller.ask(0, {"count": 0})
    closing.join(10)
    assert ended == [None]
