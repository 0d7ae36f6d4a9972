"""docs/concepts.md prints what it says: its Python blocks are run in order, each followed by its output.

HETU_FX_WRITE_DOCS=1 writes the outputs anew.
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "concepts.md"
MODEL = re.compile(r"`model\.py`:\n\n```python\n(.*?)```", re.DOTALL)
RUNS = re.compile(r"```python\n((?:(?!```).)*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """Return the names that the page's first file defines, as if it had been imported."""
    model = MODEL.search(PAGE.read_text())
    assert model is not None
    (tmp_path / "model.py").write_text(model[1])
    return runpy.run_path(str(tmp_path / "model.py"))


def test_every_block_prints_what_stands_below_it(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    written = page
    runs = RUNS.findall(page)
    assert len(runs) == 7
    for code, expected in runs:
        exec(code, names)
        printed = capsys.readouterr().out
        written = written.replace(
            f"```python\n{code}```\n\n```text\n{expected}```", f"```python\n{code}```\n\n```text\n{printed}```"
        )
    if os.environ.get("HETU_FX_WRITE_DOCS"):
        PAGE.write_text(written)
    assert written == page


def test_every_word_of_the_glossary_has_one_meaning() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| .+ \|$", PAGE.read_text().partition("## Glossary")[2], re.MULTILINE)[1:]
    assert rows == sorted(set(rows))
    assert {"home", "compute", "bridge", "variant", "factor class", "lane", "finest slice"} <= set(rows)
