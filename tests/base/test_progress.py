"""Long work is told, short work is not; no line and no thread stays behind."""

from __future__ import annotations

import io
import re
import threading
from typing import Any

import pytest

from hetu_fx.base.per_rank import as_rank
from hetu_fx.base.progress import VARIABLE, PhaseSeconds, Rhythm, speaks, telling

AT_ONCE, SOON, NEVER = 0.0, 0.01, 3600.0


@pytest.fixture(autouse=True)
def spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)


class Heard(io.StringIO):
    """A stream that knows when something was written, in which there is some text."""

    def __init__(self, awaited: str = "") -> None:
        super().__init__()
        self.written, self._awaited = threading.Event(), awaited

    def flush(self) -> None:
        if self._awaited in self.getvalue():
            self.written.set()


def told(replaces: bool) -> str:
    heard = Heard()
    with telling("capturing", heard, Rhythm(AT_ONCE, NEVER, replaces)):
        assert heard.written.wait(60)
    return heard.getvalue()


def told_of(replaces: bool, *standing: Any) -> list[str]:
    """Return the lines from where the standing of the work is said."""
    heard = Heard(standing[0])
    with telling("capturing", heard, Rhythm(AT_ONCE, SOON, replaces)) as tell:
        tell(*standing)
        assert heard.written.wait(60)
    lines = [line for line in re.split(r"[\r\n]", heard.getvalue()) if line]
    return lines[next(i for i, line in enumerate(lines) if standing[0] in line) :]


def test_a_log_has_a_line_while_it_lasts_and_one_at_the_end() -> None:
    assert told(replaces=False) == "hetu_fx: capturing ... 0 s\nhetu_fx: capturing: 0 s\n"


def test_a_terminals_line_is_written_anew() -> None:
    assert told(replaces=True) == "\rhetu_fx: capturing ... 0 s\rhetu_fx: capturing: 0 s   \n"


def test_how_much_is_done_is_told_and_on_a_terminal_with_a_bar() -> None:
    assert told_of(False, "block 1", 3, 4)[0].startswith("hetu_fx: capturing: block 1, 3 of 4 (75 %) ... ")
    *_, before, last = told_of(True, "block 1", 3, 4)
    assert before.startswith("hetu_fx: capturing: block 1, 3 of 4 (75 %) [" + "#" * 15 + "." * 5 + "] ... ")
    assert last.rstrip().startswith("hetu_fx: capturing: ")
    assert len(last) == len(before), "what was longer is written over"


def test_of_work_whose_size_nobody_knows_is_told_what_is_done_now() -> None:
    assert told_of(True, "regions")[0].startswith("hetu_fx: capturing: regions ... ")


def test_nothing_is_told_where_another_process_speaks() -> None:
    heard = Heard()
    with telling("capturing", heard, Rhythm(AT_ONCE, SOON, False), speaker=False) as tell:
        tell("block 1", 3, 4)
    assert heard.getvalue() == ""


def test_what_is_soon_over_is_not_told_and_leaves_no_thread() -> None:
    heard = Heard()
    with telling("capturing", heard, Rhythm(NEVER, NEVER, False)):
        pass
    assert heard.getvalue() == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "hetu_fx progress"]


def test_an_error_ends_it_too_and_comes_through() -> None:
    with pytest.raises(KeyError), telling("capturing", Heard(), Rhythm(NEVER, NEVER, False)):
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name == "hetu_fx progress"]


def test_a_closed_stream_stops_no_work() -> None:
    heard = Heard()
    with telling("capturing", heard, Rhythm(AT_ONCE, NEVER, False)):
        assert heard.written.wait(60)
        heard.close()


@pytest.mark.parametrize(("name", "value"), [(VARIABLE, "0"), ("LOCAL_RANK", "1")])
def test_others_and_those_who_are_asked_not_to_say_nothing(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert speaks()
    monkeypatch.setenv(name, value)
    assert not speaks()
    assert speaks(True) == (name == "LOCAL_RANK")


def test_phases_of_one_name_add_up_in_the_order_in_which_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    spent, moments = PhaseSeconds(), iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    for name in ("capture", "plan", "capture"):
        with spent.of(name):
            pass
    assert list(spent.seconds.items()) == [("capture", 5.0), ("plan", 2.0)]


def test_of_ranks_that_are_threads_none_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert speaks()
    with as_rank({}):
        assert not speaks()
