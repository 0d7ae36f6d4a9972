"""What became of all ops: a table for the terminal, bars, and a page for the docs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tests.ops.cell import PLANS, Apart, Finding, worst
from tests.ops.database import database
from tests.ops.trial import Kind

Results = Mapping[str, list[Finding] | Apart]
LEAST_RIGHT = 0.95
TITLES = {"data": "data parallel 3:1", "tensor": "tensor parallel [0,1]", "mixed": "[0,1] and [2]"}

_HEAD = """# Every op of torch, under plans

This page tries every op of torch's own operator database (`torch.testing._internal`), with the calls of torch's own
tests. Each op runs in a small model with parameters: on rows of the batch, on samples with an extra batch dim, and on
parameters alone. A tensor parallel group splits each dim that it can, one after another. A cell is the worst result.

- *right*: loss, gradients and parameters of one training step equal plain PyTorch on one device, in float64.
- *refused*: hetu_fx raises an error that says what is refused.

`python -m tests.ops --write-docs` makes this page.
"""


def cells(results: Results) -> Counter[tuple[str, Kind]]:
    """Count the cells by plan and kind."""
    found = (worst(result, plan) for result in results.values() if isinstance(result, list) for plan in PLANS)
    return Counter((cell.plan, cell.kind) for cell in found if cell is not None)


def summary(results: Results) -> str:
    """Return how many cells there are of each kind, and how many ops have none."""
    counts = cells(results)
    lines = [f"{'plan':24}" + "".join(f"{kind.value:>10}" for kind in Kind)]
    lines += [f"{TITLES[plan]:24}" + "".join(f"{counts[plan, kind]:>10}" for kind in Kind) for plan in PLANS]
    lines.append(f"{'all':24}" + "".join(f"{_count(counts, kind):>10}" for kind in Kind))
    apart = Counter(result for result in results.values() if isinstance(result, Apart))
    lines += [f"{apart[why]} ops not tried: {why.value}" for why in Apart]
    lines.append(f"{len(results)} of the {len(database())} ops that torch {torch.__version__} has in its database")
    return "\n".join(lines)


def _count(counts: Counter[tuple[str, Kind]], kind: Kind) -> int:
    return sum(counts[plan, kind] for plan in PLANS)


def bars(results: Results) -> list[dict[str, Any]]:
    """Return what is measured, beside its bars."""
    counts = cells(results)
    total = max(counts.total(), 1)
    right = _count(counts, Kind.RIGHT) / total
    unnamed = sum(not one.why.strip() for one in _all(results) if one.kind is Kind.REFUSED)
    rows: list[tuple[str, float, float, bool]] = [("share of right cells", right, LEAST_RIGHT, right >= LEAST_RIGHT)]
    bad = {kind.value: _count(counts, kind) for kind in (Kind.CRASH, Kind.WRONG)} | {"refused without a word": unnamed}
    rows += [(name, value, 0, value == 0) for name, value in bad.items()]
    return [{"name": name, "value": value, "bar": bar, "holds": holds} for name, value, bar, holds in rows]


def rows(results: Results) -> list[dict[str, Any]]:
    """Return a row for each op: its cells, and what is not right."""
    return [_row(name, result) for name, result in results.items()]


def _row(name: str, result: list[Finding] | Apart) -> dict[str, Any]:
    if isinstance(result, Apart):
        return {"op": name, "apart": result.value}
    found = {plan: worst(result, plan) for plan in PLANS}
    bad = [one for one in result if one.kind is not Kind.RIGHT]
    return {
        "op": name,
        "cells": {plan: one.kind.value for plan, one in found.items() if one is not None},
        "cases": len(result),
        "not_right": [{"plan": b.plan, "case": b.case, "kind": b.kind.value, "why": b.why} for b in bad],
    }


def results_of(told: Iterable[Mapping[str, Any]]) -> dict[str, list[Finding] | Apart]:
    """Return what rows tell: of each op a finding for each cell, and all that are not right."""
    return {row["op"]: _result(row) for row in told}


def _result(row: Mapping[str, Any]) -> list[Finding] | Apart:
    if "apart" in row:
        return Apart(row["apart"])
    cells = [Finding(plan, "", Kind(kind), "") for plan, kind in row["cells"].items() if kind == Kind.RIGHT.value]
    return cells + [Finding(one["plan"], one["case"], Kind(one["kind"]), one["why"]) for one in row["not_right"]]


def _all(results: Results) -> list[Finding]:
    return [one for result in results.values() if isinstance(result, list) for one in result]


def page(results: Results) -> str:
    """Return docs/ops.md."""
    tried = {name: result for name, result in results.items() if isinstance(result, list)}
    lines = [_HEAD, "```text", summary(results), "```", ""]
    lines += [f"| op | {' | '.join(TITLES[plan] for plan in PLANS)} |", "|---|" + "---|" * len(PLANS)]
    lines += [f"| `{name}` | {' | '.join(_cell(result, plan) for plan in PLANS)} |" for name, result in tried.items()]
    for why in Apart:
        names = [f"`{name}`" for name, result in results.items() if result is why]
        lines += ["", f"Not tried, {why.value}: {', '.join(names) or 'none'}."]
    return "\n".join([*lines, ""])


def _cell(result: list[Finding], plan: str) -> str:
    one = worst(result, plan)
    return "-" if one is None else one.kind.value
