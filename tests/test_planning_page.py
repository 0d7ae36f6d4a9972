"""The pages about planning say what is: their examples are run, their tables are those of the code.

HETU_FX_WRITE_DOCS=1 writes the outputs and tables anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetu_fx.cli.main import main
from hetu_fx.cluster.chips import CHIPS
from hetu_fx.planner.searches import SEARCHES
from hetu_fx.planner.values.options import FEATURES

COLUMNS = 80
FILES_OF_PAGE = ("--cluster=cluster.json", "--profile=profile.json")
PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
REFERENCE = PAGE.parent / "reference" / "planning.md"
FILES = re.compile(r"^`(\w+\.json)`:\n\n```json\n(.*?)```", re.MULTILINE | re.DOTALL)
RUNS = re.compile(r"(?<=```console\n)\$ hetu-fx (.*?)\n(.*?)(?=```)", re.DOTALL)
TABLE = re.compile(r"(?<=lists them too\):\n\n).*?(?=\n\nAll are compared)", re.DOTALL)
NAMES = re.compile(r"\| name \| what it is \|\n.*?(?=\n\n)", re.DOTALL)
KINDS = re.compile(r"(?<=They are known for\n).*?(?=\.\n\n)", re.DOTALL)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Return a function that runs a command of the page beside its files and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    for name, text in FILES.findall(PAGE.read_text()):
        Path(name).write_text(text)
    for count in (1, 48, 1024):
        Path(f"cluster-{count}.json").write_text(json.dumps(cluster_of(count)))
    assert main(["plan", *FILES_OF_PAGE, "--json", "--out=plan.json"]) == 0
    capsys.readouterr()

    def run(command: str) -> str:
        assert main(shlex.split(command)) == 0
        return capsys.readouterr().out

    return run


def cluster_of(count: int) -> dict[str, Any]:
    """Return a cluster of so many devices, eight on a node: A100, the second half of 48 V100."""
    kinds = ["A100-80G"] * count if count != 48 else ["A100-80G"] * 24 + ["V100-32G"] * 24
    given = json.loads(dict(FILES.findall(PAGE.read_text()))["cluster.json"])
    devices = [{"rank": rank, "kind": kind, "node": f"n{rank // 8}"} for rank, kind in enumerate(kinds)]
    return given | {"devices": devices}


def names() -> str:
    rows = [f"| `{name}` | {feature.told} |" for name, feature in FEATURES.items()]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def searches() -> str:
    rows = [f"| `{search.name}` | {search.applies} |" for search in SEARCHES.values()]
    return "\n".join(["| search | applies to |", "|---|---|", *rows])


def kinds() -> str:
    return textwrap.fill(", ".join(f"`{chip.name}`" for chip in CHIPS), 118)


def test_the_page_shows_what_the_commands_print_and_the_tables_that_there_are(output: Callable[[str], str]) -> None:
    text = PAGE.read_text()
    assert (len(FILES.findall(text)), len(RUNS.findall(text))) == (2, 7)
    _check(PAGE, RUNS.sub(lambda found: f"$ hetu-fx {found[1]}\n{output(found[1])}", text))
    tables = REFERENCE.read_text()
    for pattern, table in ((NAMES, names()), (KINDS, kinds()), (TABLE, searches())):
        tables, count = pattern.subn(table, tables)
        assert count == 1
    _check(REFERENCE, tables)


def _check(page: Path, now: str) -> None:
    if os.environ.get("HETU_FX_WRITE_DOCS"):
        page.write_text(now)
    assert page.read_text() == now


def test_what_the_commands_print_has_room_on_a_terminal() -> None:
    """Notes and runner-ups are lines of text, which terminals wrap; tables are not."""
    tables = [line for _, output in RUNS.findall(PAGE.read_text()) for line in output.splitlines() if "  " in line]
    assert len(tables) > 40
    assert max(map(len, tables)) <= COLUMNS
