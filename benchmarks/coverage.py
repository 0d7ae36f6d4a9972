"""Which model families run under which plans, and how exactly.

Every family is captured, and its ops are looked up in the rule table; then it runs forward and backward under each
plan on gloo processes, and the loss and every gradient are compared with one device: in float64 throughout, but for
mixtures of experts, whose grouped matrix products torch has in float32 at most.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers as hf

from benchmarks.families.cells import LIMITS, PLANS, SIZES, exactly, in_dtype
from benchmarks.families.families import FAMILIES, Family
from benchmarks.kit import report
from benchmarks.workers.coverage import Record, run_plans
from hetu_fx.deduction.factors.analyse import UnknownOpWarning, analyse
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph

QUICK = ("llama", "gpt2", "bert", "bart", "vit", "net: resnet")
BAR = 50
DOCUMENT = Path(__file__).parents[1] / "docs" / "coverage.md"
YES = "yes"
REASON_LENGTH = 160

Row = dict[str, str]


def main() -> int:
    """Print the table; the exit status says whether enough families run under every plan."""
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    known = _known_rows(options)
    chosen = [family for family in FAMILIES.values() if _is_chosen(family.name, options)]
    rows = [known.get(family.name) or _row(family, options) for family in chosen]
    if options.write_docs:
        DOCUMENT.write_text(_document(rows))
    bars = [report.Bar("families fully green", sum(map(_is_green, rows)), min(BAR, len(rows)), at_least=True)]
    return report.finish("coverage", bars, rows)


def _options() -> argparse.Namespace:
    parser = report.parser("coverage", "Run model families under plans and compare them with one device.")
    parser.add_argument("--only", action="append", default=[], help="a family; may be repeated")
    parser.add_argument("--graphs", action="store_true", help="only capture and look up rules, start no processes")
    parser.add_argument("--write-docs", action="store_true", help="write docs/coverage.md")
    parser.add_argument("--log", type=Path, help="a file for what each cell came to, errors in full, one JSON a line")
    parser.add_argument("--resume", action="store_true", help="take over the rows that are in the log already")
    return parser.parse_args()


def _is_chosen(name: str, options: argparse.Namespace) -> bool:
    chosen = options.only or (QUICK if options.quick else FAMILIES)
    return name in chosen


def _row(family: Family, options: argparse.Namespace) -> Row:
    """Try one family, and print its row."""
    row = dict.fromkeys(("family", "kind", "captured", "rules", *PLANS, "reason"), "")
    row |= {"family": family.name, "kind": family.kind}
    graph = _captured(family, row)
    if graph is not None:
        _look_up_rules(graph, row)
        for plan, record in run_plans(family, graph, [] if options.graphs else list(PLANS)):
            _note(row, plan, record, family)
            _log(options.log, {"cell": (family.name, plan), **record})
    _log(options.log, {"row": row})
    print(" | ".join(row.values()), file=sys.stderr, flush=True)
    return row


def _captured(family: Family, row: Row) -> Graph | None:
    try:
        torch.manual_seed(0)
        model, batch = family.make().to(family.dtype), in_dtype(family.batch(*SIZES[0]), family.dtype)
        with exactly(family.dtype):
            graph = capture(model, batch)
    except Exception as error:  # whatever a model does when it is built or traced is its row's reason
        row |= {"captured": "no", "reason": _shortened(f"{type(error).__name__}: {error}")}
        return None
    row["captured"] = YES
    return graph


def _look_up_rules(graph: Graph, row: Row) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        analyse(graph)
    unknown = sorted({_op_of(warning.message) for warning in told if issubclass(warning.category, UnknownOpWarning)})
    row |= {"rules": "no", "reason": f"no rule for {', '.join(unknown)}"} if unknown else {"rules": YES}


def _op_of(warning: Warning | str) -> str:
    return str(warning).split(" ")[1]


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
    return all((row["captured"] == YES, row["rules"] == YES, *(row[plan][:1].isdigit() for plan in PLANS)))


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
        "table, and it runs forward and backward on two batches of unlike size, of which three processes bring",
        "unequal parts, under plans for two or three of them; a pipeline has two micro-batches, or one where the",
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
