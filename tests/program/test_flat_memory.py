"""A run that switches and captures again and again keeps no descriptor, no thread and nothing of its traces."""

from __future__ import annotations

import logging

import pytest

from hetu_fx.program import captured
from tests.program.flat_memory import held_by, more

CAPTURES = 2


@pytest.mark.filterwarnings("ignore:the model has been captured")
def test_a_run_holds_no_more_once_as_many_captures_are_kept_as_ever_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_CAPTURES", CAPTURES)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])  # pytest keeps what they are given
    *_, middle, last = held_by(1, steps=24, per_switch=2, per_capture=3, looks=4)
    assert last.captures - middle.captures == CAPTURES
    assert last.switches - middle.switches == 3
    assert more(middle, last) == []
