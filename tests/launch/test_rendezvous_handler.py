"""Nodes meet, join later, die and come back through torchelastic's interface, as threads at one store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from hetu_fx.errors import EnvironmentProblem
from hetu_fx.launch.rendezvous_handler import HetuRendezvous
from hetu_fx.launch.rendezvous_store import SECRET, Endpoint
from hetu_fx.launch.times import Times

SECONDS = 60.0


def parameters(where: str, least: int, most: int, run_id: str = "job", **config: Any) -> RendezvousParameters:
    return RendezvousParameters("hetu_fx", where, run_id, least, most, **{"timeout": SECONDS, **config})


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def where() -> str:
    return free_endpoint()


@contextmanager
def nodes(where: str, count: int, least: int, most: int, **config: Any) -> Iterator[list[HetuRendezvous]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(HetuRendezvous(parameters(where, least, most, **config)))
            stack.callback(found[-1].shutdown)
        yield found


def together(handlers: Sequence[RendezvousHandler]) -> list[RendezvousInfo]:
    """Have nodes join at once; return what each was told."""
    with ThreadPoolExecutor(len(handlers)) as pool:
        started = [pool.submit(handler.next_rendezvous) for handler in handlers]
        return [one.result(timeout=SECONDS) for one in started]


def until(ready: Any) -> None:
    """Wait for something to become so."""
    deadline = time.monotonic() + SECONDS
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end_without_a_word(handler: HetuRendezvous) -> None:
    """Let a node show no further signs of life."""
    handler._at.end()


def test_torchrun_finds_it_by_name() -> None:
    (found,) = entry_points(group="torchrun.handlers", name="hetu_fx")
    made = found.load()()(parameters("127.0.0.1:0", 1, 1))
    assert isinstance(made, HetuRendezvous)
    assert (made.get_backend(), made.get_run_id(), made.use_agent_store) == ("hetu_fx", "job", True)
    made.shutdown()


def test_nodes_are_numbered_and_read_what_another_writes(where: str) -> None:
    with nodes(where, 3, 3, 3) as three:
        infos = together(three)
        assert sorted((info.rank, info.world_size) for info in infos) == [(0, 3), (1, 3), (2, 3)]
        infos[0].store.set("word", "told")
        assert [info.store.get("word") for info in infos] == [b"told"] * 3
        addresses = {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}  # type: ignore[union-attr]
        assert len(addresses) == 1
        assert [handler.num_nodes_waiting() for handler in three] == [0] * 3


def test_a_node_that_comes_later_is_in_the_next_round_behind_the_others(where: str) -> None:
    with nodes(where, 3, 2, 3) as (one, other, later):
        before = together([one, other])
        with ThreadPoolExecutor(1) as pool:
            comes = pool.submit(later.next_rendezvous)
            until(lambda: one.num_nodes_waiting() and other.num_nodes_waiting())
            after = together([one, other])
            assert comes.result(timeout=SECONDS).rank == 2
        assert [info.rank for info in after] == [info.rank for info in before]
        assert {info.world_size for info in after} == {3}
        after[0].store.set("of", "this round")
        assert not before[0].store.check(["of"])


def test_a_newcomer_waits_while_there_is_no_place(where: str) -> None:
    with nodes(where, 2, 1, 1, timeout=2.0) as (one, other):
        together([one])
        with pytest.raises(RendezvousTimeoutError, match="within 2 s"):
            other.next_rendezvous()
        assert one.num_nodes_waiting() == 0


def test_a_node_that_dies_is_missed_by_the_others_and_comes_back_as_a_newcomer(where: str) -> None:
    with nodes(where, 4, 2, 3, beat=0.1, silent=0.6) as (one, other, dies, back):
        together([one, other, dies])
        end_without_a_word(dies)
        until(lambda: one.num_nodes_waiting() and other.num_nodes_waiting())
        assert {info.world_size for info in together([one, other])} == {2}
        with ThreadPoolExecutor(1) as pool:
            comes = pool.submit(back.next_rendezvous)
            until(one.num_nodes_waiting)
            together([one, other])
            assert comes.result(timeout=SECONDS).world_size == 3


def test_of_two_nodes_the_one_that_serves_the_store_goes_on_alone(where: str) -> None:
    with nodes(where, 2, 1, 2, beat=0.1, silent=0.6) as (serves, other):
        together([serves, other])
        end_without_a_word(other)
        until(serves.num_nodes_waiting)
        assert together([serves])[0].world_size == 1


def test_the_node_that_serves_the_store_says_so_where_it_hears_none_of_two_others(where: str) -> None:
    with nodes(where, 3, 1, 3, beat=0.1, silent=0.6) as three:
        together(three)
        assert {handler.news() for handler in three} == {("", "")}
        for handler in three[1:]:
            end_without_a_word(handler)
        until(lambda: three[0].news()[0] == "lost")
        assert "do not answer" in three[0].news()[1]


def die(handler: HetuRendezvous) -> None:
    """Let a node die with what it serves."""
    store = handler._at
    store.end()
    handler._served.clear()
    store._store = None  # type: ignore[assignment]


QUICK = {"beat": 0.1, "silent": 0.6}


def test_the_next_endpoint_serves_when_the_first_is_gone_and_takes_newcomers() -> None:
    where = ",".join(free_endpoint() for _ in range(3))
    with nodes(where, 3, 1, 3, **QUICK) as (first, one, other):
        before = together([first, one, other])
        die(first)
        until(lambda: one.num_nodes_waiting() and other.num_nodes_waiting())
        after = together([one, other])
        assert sorted(info.rank for info in after) == [0, 1]
        assert {info.world_size for info in before + after} == {2, 3}
        assert one._at.where == other._at.where == Endpoint.of(where.split(",")[1])
        with nodes(where, 1, 1, 3, **QUICK) as (back,), ThreadPoolExecutor(1) as pool:
            comes = pool.submit(back.next_rendezvous)
            until(one.num_nodes_waiting)
            together([one, other])
            assert comes.result(timeout=SECONDS).world_size == 3


class CutOffStore:
    """Answers nothing until it is released, and fails then."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> None:
            self.released.wait(SECONDS)
            raise RuntimeError("reset by peer")

        return call


def test_nodes_that_move_do_not_wait_for_a_call_of_the_store_that_they_leave() -> None:
    where, cut_off = ",".join(free_endpoint() for _ in range(3)), CutOffStore()
    with nodes(where, 3, 1, 3, beat=0.1, silent=10 * SECONDS) as three:
        together(three)
        left = [handler._at for handler in three]
        for store in left:
            store._store = cut_off  # type: ignore[assignment]
        time.sleep(0.3)  # all of them are in a call
        for store in left:
            store._failure = "no answer"
        try:
            assert {info.world_size for info in together(three)} == {3}
            assert not {handler._at for handler in three} & {*left}
            assert all(store._thread.is_alive() for store in left)
        finally:
            cut_off.released.set()


def leave_and_die(handler: HetuRendezvous) -> None:
    handler.leave("", closes=False)
    die(handler)


@pytest.mark.parametrize("first", [0, 1], ids=["the first serves", "the second has taken over"])
def test_a_round_goes_on_where_the_node_that_serves_the_store_leaves_and_newcomers_join_it(first: int) -> None:
    where = ",".join(free_endpoint() for _ in range(3))
    with nodes(where, 3, 1, 3, **QUICK) as three:
        together(three)
        if first:
            die(three[0])
            until(lambda: three[1].num_nodes_waiting() and three[2].num_nodes_waiting())
            together(three[1:])
            three[1:] = sorted(three[1:], key=lambda handler: not handler._served)  # either of them takes over
            assert three[1]._served
            assert not three[2]._served
        leaves, *others = three[first:]
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(leave_and_die, leaves)
            until(lambda: leaves._me.node not in others[0]._at.read().member_nodes)
            together(others)
            left.result(timeout=SECONDS)
        for handler in others:
            until(lambda handler=handler: handler._at.lost)
            until(lambda handler=handler: handler.news() == ("", "") and not handler._at.lost)
            assert handler.num_nodes_waiting() == 0
        with nodes(where, 1, 1, 3, **QUICK) as (back,), ThreadPoolExecutor(1) as pool:
            comes = pool.submit(back.next_rendezvous)
            until(lambda: all(handler.news() == ("join", "") for handler in others))
            together(others)
            assert comes.result(timeout=SECONDS).world_size == len(others) + 1


def test_where_nobody_can_serve_the_store_after_it_left_the_others_end_the_job_as_they_are_done(where: str) -> None:
    with nodes(where, 3, 1, 3, reach=0.5, **QUICK) as (leaves, *others):
        together([leaves, *others])
        for handler in others:  # of other machines, which do not have that address
            handler._endpoints = (Endpoint("192.0.2.1", 29400),)
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(leave_and_die, leaves)
            until(lambda: leaves._me.node not in others[0]._at.read().member_nodes)
            together(others)
            left.result(timeout=SECONDS)
        until(lambda: all(handler._at.lost for handler in others))
        assert [handler.news() for handler in others] == [("", "")] * 2
        for handler in others:
            with pytest.raises(RendezvousConnectionError):
                handler.finish()
            until(lambda handler=handler: handler.news() == ("closed", ""))


def test_one_of_two_that_has_lost_the_store_does_not_go_on_alone_unless_it_may() -> None:
    where = ",".join(free_endpoint() for _ in range(2))
    with nodes(where, 2, 1, 2, timeout=4.0, **QUICK) as (first, other):
        together([first, other])
        die(first)
        until(other.num_nodes_waiting)
        with pytest.raises(RendezvousTimeoutError, match="too few of the last round are here"):
            other.next_rendezvous()
    where = ",".join(free_endpoint() for _ in range(2))
    with nodes(where, 2, 1, 2, alone_after=1.0, **QUICK) as (first, other):
        together([first, other])
        die(first)
        until(other.num_nodes_waiting)
        assert other.next_rendezvous().world_size == 1


def test_a_node_that_goes_to_another_store_can_serve_its_own_address_again() -> None:
    where = ",".join(free_endpoint() for _ in range(2))
    with nodes(where, 2, 1, 2, alone_after=0.5, **QUICK) as (first, other):
        together([first, other])
        other._endpoints, other._at._failure = other._endpoints[1:], "cut"
        assert other.next_rendezvous().world_size == 1
        first._move(0.0)
        assert first._at.where == other._at.where
        assert first._endpoints[0].serve("127.0.0.1") is not None


def test_of_three_endpoints_two_have_to_be_there_at_the_start() -> None:
    where = ",".join(free_endpoint() for _ in range(3))
    with nodes(where, 1, 1, 3, timeout=2.0) as (alone,), pytest.raises(RendezvousTimeoutError, match="1 of at least 2"):
        alone.next_rendezvous()


def test_a_closed_job_takes_nobody(where: str) -> None:
    with nodes(where, 2, 1, 2) as (one, other):
        together([one])
        one.set_closed()
        assert other.is_closed()
        with pytest.raises(RendezvousClosedError, match="'job' has ended"):
            other.next_rendezvous()


def test_an_endpoint_that_nobody_serves_is_an_error_with_its_address() -> None:
    with pytest.raises(RendezvousConnectionError, match=r"192\.0\.2\.1:29400.*\n.*hint: start the node"):
        HetuRendezvous(parameters("192.0.2.1", 1, 2, reach=0.5))


@pytest.mark.parametrize("unlike", ["id", "secret"])
def test_a_node_of_another_job_is_told_so_and_so_are_those_of_the_job(
    where: str, unlike: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SECRET, "one")
    with nodes(where, 1, 1, 2):
        monkeypatch.setenv(SECRET, "another" if unlike == "secret" else "one")
        with pytest.raises(RendezvousStateError, match="of another job"):
            HetuRendezvous(parameters(where, 1, 2, "another" if unlike == "id" else "job"))
        until(lambda: "a node was refused" in caplog.text)
        assert caplog.text.count("was refused") == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [("host", ("host", 29400)), ("10.0.0.1:1234", ("10.0.0.1", 1234)), ("[fe80::1]:80", ("fe80::1", 80))],
)
def test_an_endpoint_is_a_host_and_a_port(text: str, found: tuple[str, int]) -> None:
    assert Endpoint.of(text) == Endpoint(*found)


@pytest.mark.parametrize("text", ["", ":80", "host:", "host:port", "host:70000"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentProblem, match="no endpoint"):
        Endpoint.of(text)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"beet": 1}, "it takes alone_after, beat, come"),
        ({"beat": 0}, "above 0"),
        ({"beat": "x"}, "number"),
        ({"beat": 1}, "late"),
    ],
)
def test_times_that_are_none_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(EnvironmentProblem, match=why):
        Times.of(given)
