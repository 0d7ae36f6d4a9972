"""Work in threads, one piece after the other: the order, and what becomes of an error."""

from __future__ import annotations

from threading import Event

import pytest

from hetu_fx.comm_ops.wire.serial_threads import SerialExecutor


def test_pieces_run_in_the_order_given_and_beside_the_caller() -> None:
    turns, may_run, done = SerialExecutor(), Event(), []
    pieces = [lambda: may_run.wait(60) and done.append(0), lambda: done.append(1), lambda: done.append(2)]
    under_way = [turns.start(piece) for piece in pieces]
    assert done == [], "the caller was kept waiting"
    may_run.set()
    under_way[2].wait()
    assert done == [0, 1, 2]


def test_waiting_for_the_end_is_bounded_and_raises_nothing() -> None:
    may_run = Event()

    def fail() -> None:
        may_run.wait(60)
        raise KeyError("lost")

    piece = SerialExecutor().start(fail)
    assert not piece.is_over(0.0)
    may_run.set()
    assert piece.is_over(60.0)
    assert isinstance(piece.error, KeyError)


def test_an_error_comes_out_where_the_piece_is_waited_for_and_nothing_runs_after_it() -> None:
    turns, done = SerialExecutor(), []

    def fail() -> None:
        raise KeyError("lost")

    before, failing, after = turns.start(lambda: done.append(0)), turns.start(fail), turns.start(lambda: done.append(2))
    before.wait()
    for piece in (failing, after):
        with pytest.raises(KeyError, match="lost"):
            piece.wait()
    assert done == [0]
