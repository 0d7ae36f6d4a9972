"""The notebook runs, and shows what it has in the file. HETU_FX_WRITE_DOCS=1 writes what it shows anew."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.notebook import code_cells
from tests.spawned import run

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
SECONDS = 240
MOST_BYTES = 500_000


def read() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text())
    return notebook


def told(outputs: list[dict[str, Any]]) -> list[Any]:
    """Return what must be the same everywhere."""
    return [part for output in outputs for part in (output.get("text"), output.get("data", {}))]


@pytest.mark.timeout(SECONDS + 60)
def test_the_notebook_shows_what_it_has_in_the_file() -> None:
    status, said = run(sys.executable, "-m", "tests.examples.notebook", str(NOTEBOOK), seconds=SECONDS)
    assert status == 0, said[-4000:]
    outputs = json.loads(said.splitlines()[-1])
    notebook = read()
    if os.environ.get("HETU_FX_WRITE_DOCS"):
        for number, (cell, made) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
            cell.update(outputs=made, execution_count=number)
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    assert [told(made) for made in outputs] == [told(cell["outputs"]) for cell in code_cells(notebook)]


def test_the_file_is_small_names_no_machine_and_every_cell_has_run() -> None:
    text = NOTEBOOK.read_text()
    assert len(text.encode()) < MOST_BYTES
    assert re.findall(r"/(?:home|root|work|tmp|Users)/", text) == []
    cells = code_cells(read())
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))


def test_it_has_pictures_of_a_plan_a_timeline_and_a_graph() -> None:
    kinds = {kind for cell in code_cells(read()) for output in cell["outputs"] for kind in output.get("data", {})}
    assert {"image/svg+xml", "text/html"} <= kinds
