"""docs/planning.md says what is: its examples are run, its tables are those of the code.

HETU_FX_WRITE_DOCS=1 writes the outputs and tables anew.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from hetu_fx.cli.main import main
from hetu_fx.cluster.chips import CHIPS
from hetu_fx.planner.searches import SEARCHES

PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
FILES = re.compile(r"^`(\w+\.json)`:\n\n```json\n(.*?)```", re.MULTILINE | re.DOTALL)
RUNS = re.compile(r"(?<=```console\n)\$ hetu-fx (.*?)\n(.*?)(?=```)", re.DOTALL)
TABLE = re.compile(r"(?<=search=NAME\)`:\n\n).*?(?=\n\nAll are compared)", re.DOTALL)
KINDS = re.compile(r"(?<=They are known for\n).*?(?=\.\n`rate`)", re.DOTALL)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Return a function that runs a command of the page beside its files and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, text in FILES.findall(PAGE.read_text()):
        Path(name).write_text(text)

    def run(command: str) -> str:
        assert main(shlex.split(command)) == 0
        return capsys.readouterr().out

    return run


def searches() -> str:
    rows = [f"| `{search.name}` | {search.applies} |" for search in SEARCHES.values()]
    return "\n".join(["| search | applies to |", "|---|---|", *rows])


def kinds() -> str:
    return textwrap.fill(", ".join(f"`{chip.name}`" for chip in CHIPS), 118)


def test_the_page_shows_what_the_commands_print_and_the_tables_that_there_are(output: Callable[[str], str]) -> None:
    text = PAGE.read_text()
    now = RUNS.sub(lambda found: f"$ hetu-fx {found[1]}\n{output(found[1])}", text)
    now = KINDS.sub(kinds(), TABLE.sub(searches(), now))
    assert len(FILES.findall(text)) == len(RUNS.findall(text)) == 2
    if os.environ.get("HETU_FX_WRITE_DOCS"):
        PAGE.write_text(now)
    assert PAGE.read_text() == now
