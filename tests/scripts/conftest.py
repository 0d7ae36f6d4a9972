"""Processes that scripts run on, started once for all tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.scripts.crew import Crew, crew
from tests.scripts.settings import SETTINGS

Crews = Callable[[str], Crew]


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    """Give the processes of a setting by its name; "" is one process alone."""
    with ExitStack() as stack:
        made: dict[str, Crew] = {}

        def of(setting: str) -> Crew:
            if setting not in made:
                made[setting] = stack.enter_context(crew(setting, SETTINGS[setting].world if setting else 1))
            return made[setting]

        yield of
