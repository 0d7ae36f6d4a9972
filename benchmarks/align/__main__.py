"""How exact ops are in bf16 and compiled by inductor, in twenty families; whether planted faults are found and named;
and whether the criterion on losses tells an honest kind from a faulty one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from benchmarks.align.faults import FAULTS, planted
from benchmarks.align.page import document
from benchmarks.align.subjects import EXPLAINED, NAMES, QUICK, subject
from benchmarks.align.trainings import FAULTY, HONEST, losses_in, reference_losses
from benchmarks.kit import report
from benchmarks.kit.smallest import few
from hetu_fx_align.align import AlignedOp, align_ops
from hetu_fx_align.drift import whole_run
from hetu_fx_align.judge import Verdict
from hetu_fx_align.losses import compare_losses
from hetu_fx_align.way import WAYS, Runner, Way

DOCUMENT = Path(__file__).parents[2] / "docs" / "alignment.md"
PARTS = ("dtype", "faults", "losses", "inductor")
SHOWN = 3  # of the ops that a row names
Row = dict[str, Any]


def main() -> int:
    """Print the table; the exit status says whether all bars hold."""
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    chosen = options.only or few(QUICK if options.quick else NAMES)
    parts = options.part or few(PARTS, 3)  # all but what compiles each op
    rows = _Rows(options)
    for part in parts:
        MAKE[part](chosen, rows)
    if options.write_docs:
        DOCUMENT.write_text(document(rows.rows))
    return report.finish("align", bars(rows.rows, chosen, parts), rows.rows)


def _options() -> argparse.Namespace:
    parser = report.parser("align", "Run the ops of model families in two ways, plant faults, and look for them.")
    parser.add_argument("--only", action="append", default=[], help="a family; may be repeated")
    parser.add_argument("--part", action="append", choices=PARTS, default=[], help="may be repeated (default: all)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further row after this time")
    parser.add_argument("--log", type=Path, help="a file for each row, one JSON a line")
    parser.add_argument("--resume", action="store_true", help="take over the rows that are in the log already")
    parser.add_argument("--write-docs", action="store_true", help="write docs/alignment.md")
    return parser.parse_args()


class _Rows:
    """The rows so far, by what they are of; those of a log are taken over."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.log, self.end = options.log, time.monotonic() + options.seconds
        known = self.log.read_text().splitlines() if options.resume and self.log and self.log.exists() else []
        self.known = {row["of"]: row for row in map(json.loads, known)}
        self.rows: list[Row] = []

    def add(self, of: str, make: Callable[[], Row]) -> None:
        """Make a row, unless it is known or the time is over."""
        row = self.known.get(of)
        if row is None and time.monotonic() < self.end:
            row = {"of": of, **make()}
            print(json.dumps(row), file=sys.stderr, flush=True)
            if self.log is not None:
                with self.log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        if row is not None:
            self.rows.append(row)


def _dtypes(families: Sequence[str], rows: _Rows) -> None:
    for name in families:
        for way in ("fp32", "bf16"):
            rows.add(f"dtype: {name}, {way}", partial(_aligned, name, Runner(WAYS[way])))


def _inductor(families: Sequence[str], rows: _Rows) -> None:
    runner = Runner(WAYS["inductor"])  # one for all: what families have in common is compiled once
    for name in families:
        rows.add(f"inductor: {name}", partial(_aligned, name, runner))


def _faults(families: Sequence[str], rows: _Rows) -> None:
    for number, name in enumerate(families):
        for fault in few(FAULTS):
            rows.add(f"fault: {name}, {fault}", partial(_planted, name, fault, number))


def _losses(families: Sequence[str], rows: _Rows) -> None:
    kinds = {"honest: bf16": HONEST, **{f"faulty: {name}": way for name, way in FAULTY.items()}}
    for name, way in kinds.items():
        rows.add(f"losses of a kind that is {name}", partial(_compared, way))


def _compared(way: Way) -> Row:
    found = compare_losses(losses_in(way), reference_losses())
    return {"mean relative error": found.mean_relative_error, "alike": found.is_alike}


MAKE: Mapping[str, Callable[[Sequence[str], _Rows], None]] = {
    "dtype": _dtypes,
    "inductor": _inductor,
    "faults": _faults,
    "losses": _losses,
}


def _aligned(family: str, runner: Runner) -> Row:
    """Return how a family's ops do in a way, each alone and all together."""
    given = subject(family)
    ops = align_ops(given.graph, given.leaves, (runner,), {})
    wrong = {op.op.call.name: _told(op) for op in reversed(ops) if not op.is_within}  # of each the worst
    unexplained = {name: told for name, told in wrong.items() if (runner.way.name, name) not in EXPLAINED}
    run = whole_run(given.graph, given.leaves, runner)
    first = run.first[0] if run.first else None
    return {
        "way": runner.way.name,
        "ops": len(ops),
        "calls": sum(op.op.count for op in ops),
        "within": sum(op.is_within for op in ops),
        "explained": ", ".join(f"{name} {told}" for name, told in wrong.items() if name not in unexplained),
        "unexplained": "; ".join([f"{name} {told}" for name, told in unexplained.items()][:SHOWN]),
        "loss": abs(run.loss - run.reference) / abs(run.reference) if run.loss and run.reference else run.says,
        "drifts first": f"{first.op} in {first.module or '(model)'}" if first else "",
    }


def _told(op: AlignedOp) -> str:
    verdict: Verdict = op.verdicts[0]
    if verdict.worst is None:
        return verdict.says
    return f"{verdict.worst.what} {verdict.worst.error:.1e} ({verdict.worst.allowed:.1e})"


def _planted(family: str, fault: str, number: int) -> Row:
    made = planted(subject(family), fault, number)
    told = {"op": made.op, "direction": made.direction, "named": made.named, "first": made.first}
    return {**told, "found": made.is_found}


def bars(rows: Sequence[Row], families: Sequence[str], parts: Sequence[str]) -> list[report.Bar]:
    """Return the bars of the parts that were run; families that were not reached miss theirs."""
    of = {
        part: [row for row in rows if row["of"].startswith(part)] for part in ("dtype", "inductor", "fault", "losses")
    }
    made = []
    for part, ways in (("dtype", 2), ("inductor", 1)):
        if part in parts:
            clear = sum(not row["unexplained"] for row in of[part])
            made.append(
                report.Bar(f"{part}: rows without an unexplained op", clear, ways * len(families), at_least=True)
            )
    if "faults" in parts:
        found = sum(row["found"] for row in of["fault"])
        made.append(report.Bar("planted faults found and named", found, len(FAULTS) * len(families), at_least=True))
    if "losses" in parts:
        right = sum(row["alike"] == ("honest" in row["of"]) for row in of["losses"])
        made.append(report.Bar("kinds told right by their losses", right, 1 + len(FAULTY), at_least=True))
    return made


if __name__ == "__main__":
    raise SystemExit(main())
