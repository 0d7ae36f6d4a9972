"""Ranks that are asked answer in threads: bytes arrive where they are wanted, refusals and ends are told."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from hetu_fx.comm_ops.wire.one_sided import Caller, Listener, Question, Refused
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
    with pytest.raises(Refused, match="StateError: less than nothing"):
        caller.ask(0, {"count": -1}, found)
    with pytest.raises(Refused, match="16 bytes instead of 8"):
        caller.ask(0, {"count": 2}, found)
    caller.ask(0, {"count": 1}, found)
    listener.close()


def test_who_does_not_know_the_secret_is_not_answered() -> None:
    listener = Listener(numbers)
    stranger = Caller([replace(listener.address, secret=bytes(32))], 10)
    with pytest.raises(CommError, match="is not that rank"):
        stranger.ask(0, {"count": 1}, torch.empty(1, dtype=torch.float64))
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
