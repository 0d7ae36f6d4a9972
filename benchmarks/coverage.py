"""Which model families run under which plans, and how exactly.

Every family is captured, and its ops are looked up in the rule table; then it runs forward and backward under each
plan, as all ranks of one process, and the loss and every gradient are compared with one device: in float64 throughout,
but for mixtures of experts, whose grouped matrix products torch has in float32 at most. Each family has a process of
its own, so that one that crashes or never ends costs the others nothing.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import torch
import transformers as hf

from benchmarks.families import page
from benchmarks.families.cells import LIMITS, PLANS
from benchmarks.families.families import FAMILIES
from benchmarks.families.trials import CAPTURED, YES, Row, parser, row_of, tried
from benchmarks.kit import report
from benchmarks.kit.smallest import is_smallest

QUICK = ("llama", "gpt2", "bert", "bart", "vit", "net: resnet")
SMALLEST = "net: alexnet"
SHARE = 0.97


def main() -> int:
    """Print the table; the exit status says whether enough families run under every plan."""
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    families = [family for family in FAMILIES.values() if _is_chosen(family.name, options)]
    plans = () if options.graphs else tuple(options.plan or PLANS)
    found = tried(families, plans, options)
    rows = [row_of(family, found[family.name], plans) for family in families]
    if options.write_docs:
        page.write_families(_document(rows))
    share = sum(map(_is_green, rows)) / len(rows)
    return report.finish("coverage", [report.Bar("share of families fully green", share, SHARE, at_least=True)], rows)


def _options() -> argparse.Namespace:
    made = parser("coverage", "Run model families under plans and compare them with one device.")
    made.add_argument("--graphs", action="store_true", help="only capture and look up rules, run no plan")
    made.add_argument("--write-docs", action="store_true", help="write docs/coverage.md")
    return made.parse_args()


def _is_chosen(name: str, options: argparse.Namespace) -> bool:
    chosen = options.only or ((SMALLEST,) if is_smallest() else QUICK if options.quick else FAMILIES)
    return name in chosen


def _is_green(row: Row) -> bool:
    return all((row[CAPTURED] == YES, row["rules"] == YES, *(row.get(plan, "")[:1].isdigit() for plan in PLANS)))


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
        "Each is a tiny model of about two blocks. It is captured with its loss, and every op is looked up in the rule",
        "table. It runs forward and backward on two batches of different sizes, under plans for two or three ranks of",
        "one process, with unequal shares. A pipeline has two micro-batches, or one if the model needs the whole batch",
        "(batch norm). A number is the worst relative difference from one device, of the loss or of any gradient.",
        f"Limits of the two: {limits}.",
        "",
        page.markdown(heads, rows),
        "",
    ]
    missing = [row for row in rows if not _is_green(row)]
    if missing:
        lines += ["## Why not", "", *(f"- {row['family']}: {row['reason']}" for row in missing), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
