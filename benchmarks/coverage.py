"""Which model families run under which plans, and how exactly.

Every family is captured, and its ops are looked up in the rule table; then it runs forward and backward under each
plan, as all ranks of one process, and the loss and every gradient are compared with one device: in float64 throughout,
but for mixtures of experts, whose grouped matrix products torch has in float32 at most. Each family has a process of
its own, so that one that crashes or never ends costs the others nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers as hf

from benchmarks.families.cells import LIMITS, PLANS, Subject
from benchmarks.families.families import FAMILIES, Family
from benchmarks.kit import report
from benchmarks.kit.forks import Tell, in_forks
from benchmarks.kit.smallest import is_smallest
from hetu_fx.errors import DivergedError, HetuFxError

QUICK = ("llama", "gpt2", "bert", "bart", "vit", "net: resnet")
SMALLEST = "net: alexnet"
SHARE = 0.97
SECONDS_PER_CELL = 240.0
"""Without a word, after which a family is given up; the machine may have other work."""
DOCUMENT = Path(__file__).parents[1] / "docs" / "coverage.md"
CAPTURED, YES = "captured", "yes"
REASON_LENGTH = 160

Row = dict[str, str]
Record = Mapping[str, Any]

DIED: Record = {"broken": f"its process died, or said nothing for {SECONDS_PER_CELL:.0f} s"}


def main() -> int:
    """Print the table; the exit status says whether enough families run under every plan."""
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    rows = rows_of([family for family in FAMILIES.values() if _is_chosen(family.name, options)], options)
    if options.write_docs:
        DOCUMENT.write_text(_document(rows))
    share = sum(map(_is_green, rows)) / len(rows)
    return report.finish("coverage", [report.Bar("share of families fully green", share, SHARE, at_least=True)], rows)


def _options() -> argparse.Namespace:
    parser = report.parser("coverage", "Run model families under plans and compare them with one device.")
    parser.add_argument("--only", action="append", default=[], help="a family; may be repeated")
    parser.add_argument("--graphs", action="store_true", help="only capture and look up rules, run no plan")
    parser.add_argument("--write-docs", action="store_true", help="write docs/coverage.md")
    parser.add_argument("--log", type=Path, help="a file for what each cell came to, errors in full, one JSON a line")
    parser.add_argument("--resume", action="store_true", help="take over the rows that are in the log already")
    return parser.parse_args()


def _is_chosen(name: str, options: argparse.Namespace) -> bool:
    chosen = options.only or ((SMALLEST,) if is_smallest() else QUICK if options.quick else FAMILIES)
    return name in chosen


def rows_of(families: Sequence[Family], options: argparse.Namespace) -> list[Row]:
    """Try families, several at once, and print their rows; those of a run that was interrupted are taken over."""
    rows = _known_rows(options)
    left = [family.name for family in families if family.name not in rows]
    plans = [] if options.graphs else list(PLANS)
    for name, heard in in_forks(left, partial(_try, plans), _at_once(), SECONDS_PER_CELL):
        rows[name] = _row(FAMILIES[name], dict(heard), plans)
        for what, record in heard:
            _log(options.log, {"cell": (name, what), **record})
        _log(options.log, {"row": rows[name]})
        print(" | ".join(rows[name].values()), file=sys.stderr, flush=True)
    return [rows[family.name] for family in families]


def _at_once() -> int:
    return len(os.sched_getaffinity(0))


def _try(plans: Sequence[str], name: str, tell: Tell) -> None:
    """Capture a family and run it under plans; tell what each came to."""
    try:
        subject = Subject(FAMILIES[name])
    except Exception as error:  # whatever a model does when it is built or traced is its row's reason
        tell((CAPTURED, _failure("refused", error)))
        return
    tell((CAPTURED, {"unknown_ops": subject.unknown_ops}))
    for plan in plans:
        tell((plan, _attempt(subject, plan)))


def _attempt(subject: Subject, plan: str) -> Record:
    start = perf_counter()
    try:
        record: Record = {"differences": subject.try_plan(plan)}
    except DivergedError as error:  # ranks that do not agree are no refusal
        record = _failure("broken", error)
    except HetuFxError as error:
        record = _failure("refused", error)
    except Exception as error:  # to be told, not to end the run
        record = _failure("broken", error)
    return {"seconds": perf_counter() - start, **record}


def _failure(kind: str, error: Exception) -> Record:
    return {kind: f"{type(error).__name__}: {error}", "trace": "".join(traceback.format_exception(error))}


def _row(family: Family, heard: Mapping[str, Record], plans: Sequence[str]) -> Row:
    """Lay out what a family came to; what was not heard of is what its process died of."""
    row = dict.fromkeys(("family", "kind", CAPTURED, "rules", *PLANS, "reason"), "")
    row |= {"family": family.name, "kind": family.kind}
    captured = heard.get(CAPTURED, DIED)
    if "unknown_ops" not in captured:
        reason = next(str(captured[kind]) for kind in ("refused", "broken") if kind in captured)
        return row | {CAPTURED: "no", "reason": _shortened(reason)}
    unknown = captured["unknown_ops"]
    row |= {CAPTURED: YES, "rules": "no" if unknown else YES}
    row["reason"] = f"no rule for {', '.join(unknown)}" if unknown else ""
    for plan in plans:
        _note(row, plan, heard.get(plan, DIED), family)
    return row


def _note(row: Row, plan: str, record: Record, family: Family) -> None:
    """Write what a cell came to into its row; the first thing that is wrong is the row's reason."""
    if "differences" in record:
        found = [record["differences"][what] for what in ("loss", "gradient")]
        good = all(value <= limit for value, limit in zip(found, LIMITS[family.dtype], strict=True))
        row[plan] = f"{max(found):.0e}" if good else f"wrong {max(found):.0e}"
        reason = "" if good else f"{plan}: differs by {max(found):.1e}"
    else:
        kind = "refused" if "refused" in record else "broken"
        row[plan], reason = kind, f"{plan}: {record[kind]}"
    row["reason"] = row["reason"] or _shortened(reason)


def _is_green(row: Row) -> bool:
    return all((row[CAPTURED] == YES, row["rules"] == YES, *(row[plan][:1].isdigit() for plan in PLANS)))


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= REASON_LENGTH else f"{line[: REASON_LENGTH - 3]}..."


def _log(file: Path | None, record: Record) -> None:
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")


def _known_rows(options: argparse.Namespace) -> dict[str, Row]:
    """Read the rows of a run that was interrupted."""
    if not options.resume or options.log is None or not options.log.exists():
        return {}
    rows = [record["row"] for record in map(json.loads, options.log.read_text().splitlines()) if "row" in record]
    return {row["family"]: row for row in rows}


def _document(rows: Sequence[Row]) -> str:
    """Lay the table out as a page."""
    heads = ["family", "kind", "captured", "rules", *PLANS]
    green = sum(map(_is_green, rows))
    limits = "; ".join(
        f"{str(dtype).removeprefix('torch.')} {loss:.0e} and {gradient:.0e}"
        for dtype, (loss, gradient) in LIMITS.items()
    )
    lines = [
        "# Model families and plans",
        "",
        f"Written by `python -m benchmarks.coverage --write-docs` with torch {torch.__version__.partition('+')[0]} and",
        f"transformers {hf.__version__}. {green} of {len(rows)} families run under every plan as on one device.",
        "",
        "Each is a tiny model of two blocks or so. It is captured (loss included), every op is looked up in the rule",
        "table, and it runs forward and backward on two batches of unlike size, of which three ranks (of one process)",
        "bring unequal parts, under plans for two or three of them; a pipeline has two micro-batches, or one where the",
        "model works something out from the whole batch (batch norm). A number is the worst relative difference from",
        f"one device, of the loss or of any gradient. Limits of the two: {limits}.",
        "",
        _markdown(heads, rows),
        "",
    ]
    missing = [row for row in rows if not _is_green(row)]
    if missing:
        lines += ["## Why not", "", *(f"- {row['family']}: {row['reason']}" for row in missing), ""]
    return "\n".join(lines)


def _markdown(heads: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [heads, ["---"] * len(heads), *([row[head] for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
