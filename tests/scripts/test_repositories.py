"""Scripts in the style of repositories, with the one line: one process and two make of them what plain PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scripts.crew import Crew, crew
from tests.scripts.run import plain_outcome, verdict_of
from tests.scripts.script import Script, scripts
from tests.scripts.settings import SETTINGS
from tests.scripts.verdict import is_expected

ONE_AND_TWO = ("one", "dp2")


@pytest.fixture(scope="module")
def alone() -> Iterator[Crew]:
    with crew("", 1) as made:
        yield made


@pytest.fixture(scope="module", params=ONE_AND_TWO)
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[Crew, int]]:
    world = SETTINGS[request.param].world
    with crew(request.param, world) as made:
        yield made, world


REPOSITORIES = [one for one in scripts().values() if one.area == "repositories"]


@pytest.mark.distributed
@pytest.mark.parametrize("script", REPOSITORIES, ids=lambda one: one.name)
def test_a_repository_with_the_one_line_trains_what_it_trains_without(
    script: Script, alone: Crew, ranks: tuple[Crew, int]
) -> None:
    found, world = ranks
    verdict = verdict_of(script, plain_outcome(script, alone), found, world)
    assert is_expected(script, verdict), f"{verdict.kind.value}: {verdict.why}"
