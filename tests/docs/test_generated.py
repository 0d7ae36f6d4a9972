"""Pages that are made from the code are those of the code. HETU_FX_WRITE_DOCS=1 writes them anew."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hetu_fx.errors import HetuFxError
from tests.docs.expectations import EXPECTATIONS
from tests.docs.generated import errors_page, expectations_page
from tests.scripts.script import scripts

ROOT = Path(__file__).parents[2]
PAGES = {"errors.md": errors_page, "expectations.md": expectations_page}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_that_of_the_code(name: str) -> None:
    page, made = ROOT / "docs" / name, PAGES[name]
    _check(page, made)


def _check(page: Path, made: Callable[[], str]) -> None:
    if os.environ.get("HETU_FX_WRITE_DOCS"):
        page.write_text(made())
    assert page.read_text() == made(), "run this test with HETU_FX_WRITE_DOCS=1"


@pytest.mark.parametrize("error", HetuFxError.__subclasses__(), ids=lambda error: error.__name__)
def test_every_error_has_a_hint(error: type[HetuFxError]) -> None:
    if error.__module__ == HetuFxError.__module__:
        assert "Hint: " in (inspect.getdoc(error) or "")


def test_everything_that_is_named_is_there() -> None:
    named = [shown for wanted in EXPECTATIONS for shown in wanted.shown]
    assert [shown for shown in named if not _is_there(shown)] == []


def _is_there(shown: str) -> bool:
    kind, colon, name = shown.partition(": ")
    if colon and kind == "script":
        return name in scripts()
    if colon:
        return any((ROOT / "benchmarks" / file).is_file() for file in (f"{name}.py", f"{name}/__main__.py"))
    file, _, function = shown.partition("::")
    path = ROOT / "tests" / file
    return path.is_file() and re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE) is not None


def test_there_are_48_and_at_least_44_are_shown() -> None:
    assert len(EXPECTATIONS) == 48
    assert sum(bool(wanted.shown) for wanted in EXPECTATIONS) >= 44
