"""Every op of torch's operator database under plans, against plain PyTorch: `python -m tests.ops`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from tests.ops.cell import Apart, Finding
from tests.ops.crew import find_all
from tests.ops.database import database
from tests.ops.report import Results, bars, page, results_of, rows, summary
from tests.ops.trial import Kind

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def main(given: Sequence[str] | None = None) -> int:
    """Try what is asked for; print what is not right, the table, and JSON at last; 0 if all bars hold."""
    options = _options(given)
    results = _joined(options.join) if options.join else _tried(options)
    print(summary(results))
    if options.write_docs:
        PAGE.write_text(page(results))
    found = {"benchmark": "ops", "bars": bars(results), "rows": rows(results)}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(json.dumps({"benchmark": "ops", "bars": found["bars"], "ops": len(results)}))
    return 0 if all(bar["holds"] for bar in found["bars"]) else 1


def _tried(options: argparse.Namespace) -> Results:
    names, started = _chosen(options), time.monotonic()
    results: dict[str, list[Finding] | Apart] = {}
    for number, (name, result) in enumerate(find_all(names, options.seed, options.samples), 1):
        results[name] = result
        print(f"{number}/{len(names)} {time.monotonic() - started:.0f} s {name}", file=sys.stderr, flush=True)
        for line in _told(name, result, options.verbose):
            print(line, flush=True)
    return results


def _joined(files: Sequence[Path]) -> Results:
    """Return what the shards of a run have found, in the order of their ops."""
    told = [row for file in files for row in json.loads(file.read_text())["rows"]]
    return results_of(sorted(told, key=lambda row: row["op"]))


def _told(name: str, result: list[Finding] | Apart, verbose: bool) -> list[str]:
    """Return a line for each case that is not as it must be; with `verbose` also what is refused or left out."""
    if isinstance(result, Apart):
        return [f"{name}: {result.value}"] if verbose else []
    told = (Kind.REFUSED, Kind.CRASH, Kind.WRONG) if verbose else (Kind.CRASH, Kind.WRONG)
    return [f"{one.kind.value:8}{name} [{one.plan}: {one.case}] {one.why}" for one in result if one.kind in told]


def _chosen(options: argparse.Namespace) -> list[str]:
    names = [name for name in database() if not options.only or any(fnmatch(name, only) for only in options.only)]
    number, _, count = (options.shard or "1/1").partition("/")
    return names[int(number) - 1 :: int(count)]


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.ops", description=__doc__)
    parser.add_argument("--only", action="append", metavar="OP", help="only ops of this name, * allowed; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="of samples and numbers (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=1, help="of each op in each embedding (default: %(default)s)")
    parser.add_argument("--shard", metavar="I/N", help="only the I-th of N parts of the ops, I from 1")
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="FILE", help="join what shards have written, and try nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found there")
    parser.add_argument("--write-docs", action="store_true", help="write docs/ops.md")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for what is refused or left out too")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
