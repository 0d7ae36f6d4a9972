"""Cells of the parity matrix run as processes, and the table of support that is made of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.end_to_end.cells import MODELS, PLANS, REFUSED, Cell
from tests.end_to_end.parity_rank import main
from tests.spawned import forked

SECONDS_IN_ALL = 3000 if os.environ.get("HETU_FX_PARITY") == "full" else 900


def outcomes_of(cells: Sequence[Cell], devices: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run cells on ranks that compute on the given devices; give the worst of all ranks for each cell."""
    (folder / "cells.json").write_text(json.dumps([[c.model, c.plan, c.data] for c in cells]))
    run_ranks(folder, devices)
    ranks = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(len(devices))]
    return {cell.name: worst_of([rank[cell.name] for rank in ranks if cell.name in rank]) for cell in cells}


def run_ranks(folder: Path, devices: Sequence[str]) -> None:
    workers = [forked(main, rank, folder, devices) for rank in range(len(devices))]
    try:
        for worker in workers:
            worker.join(SECONDS_IN_ALL)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def worst_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    for key in ("failed", "refused"):
        for result in results:
            if key in result:
                return result
    return max(results, key=lambda r: (len(r["wrong"]), r["worst"])) if results else {"failed": "did not run"}


def check_outcome(cell: Cell, outcome: dict[str, Any]) -> None:
    reason = REFUSED.get((cell.model, cell.plan))
    if reason is not None:
        assert reason in outcome.get("refused", ""), outcome
        return
    assert "failed" not in outcome, outcome["failed"]
    assert "refused" not in outcome, outcome["trace"]
    assert outcome["wrong"] == {}, outcome["wrong"]


def write_table(found: Mapping[str, dict[str, Any]]) -> None:
    """Write the support table from what has just run."""
    lines = ["| model | " + " | ".join(PLANS) + " |", "| --- |" + " --- |" * len(PLANS)]
    for model in MODELS:
        marks = [mark(found[Cell(model, plan).name]) for plan in PLANS]
        lines.append(f"| {model} | " + " | ".join(marks) + " |")
    notes = sorted({o["refused"] for o in found.values() if "refused" in o})
    text = "\n".join(
        [
            "# What runs under which plan",
            "",
            "Written by `make parity`. Each cell trains four steps with AdamW in fp64: even rows, 7 rows, ignored",
            "labels, another length. It compares loss, every gradient and the parameters with one device. The number",
            "is the worst relative difference. Losses of transformers are in fp64 too; all of mixtral is in fp32.",
            "",
            *lines,
            "",
            "Refused, with the message of the error:",
            "",
            *(f"- {note.replace(chr(10), '; ')}" for note in notes),
            "",
        ]
    )
    (Path(__file__).parents[2] / "docs" / "support.md").write_text(text)


def mark(outcome: dict[str, Any]) -> str:
    if "failed" in outcome:
        return "fails"
    if "refused" in outcome:
        return "refused"
    return "wrong" if outcome["wrong"] else f"{outcome['worst']:.0e}"
