"""Long work is told, short work is not; no line and no thread stays behind."""

from __future__ import annotations

import io
import threading

import pytest

from hetu_fx.base.progress import VARIABLE, Rhythm, speaks, telling

AT_ONCE, NEVER = 0.0, 3600.0


@pytest.fixture(autouse=True)
def spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)


class Heard(io.StringIO):
    """A stream that knows when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


def told(replaces: bool) -> str:
    heard = Heard()
    with telling("capturing", heard, Rhythm(AT_ONCE, NEVER, replaces)):
        assert heard.written.wait(60)
    return heard.getvalue()


def test_a_log_has_a_line_while_it_lasts_and_one_at_the_end() -> None:
    assert told(replaces=False) == "hetu_fx: capturing ... 0 s\nhetu_fx: capturing: 0 s\n"


def test_a_terminals_line_is_written_anew() -> None:
    assert told(replaces=True) == "\rhetu_fx: capturing ... 0 s\rhetu_fx: capturing: 0 s\n"


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
