"""Which scripts `make test` runs, each in one setting of two processes; `python -m tests.scripts` runs all in all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scripts.conftest import Crews
from tests.scripts.run import plain_outcome, verdict_of
from tests.scripts.script import Script, scripts, usual
from tests.scripts.settings import SETTINGS
from tests.scripts.verdict import is_expected

TURNS = ("dp2", "tp2")
EVERY = 4  # of how many scripts one is selected

OF_TABLES = {"Trainer: label smoothing": "tp2", "Lightning: a module that returns its loss": "pp2"}
"""Those of areas with a table of their own, and the setting of each."""


def selected(*settings: str) -> list[Any]:
    """Return the scripts whose turn it is in these settings, as parameters of a test: a script and its setting."""
    picked = usual()[::EVERY]
    turns = [(one, TURNS[i % 2]) for i, one in enumerate(picked) if set(TURNS) <= set(one.settings)]
    pairs = [*turns, *((scripts()[name], setting) for name, setting in OF_TABLES.items())]
    return [pytest.param(*pair, id=f"{pair[0].name} / {pair[1]}") for pair in pairs if pair[1] in settings]


def check(script: Script, setting: str, crews: Crews) -> None:
    """Hold what a script comes to in a setting against what it comes to in one process of plain torch."""
    verdict = verdict_of(script, plain_outcome(script, crews("")), crews(setting), SETTINGS[setting].world)
    assert is_expected(script, verdict), f"{verdict.kind.value}: {verdict.why}"
