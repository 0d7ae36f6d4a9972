"""Whether every benchmark still runs: the smallest case of each, in a fork of this process, which imports them all.

What they measure is not asked. A benchmark passes that ends with status 0 and one line of JSON with its bars and rows.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from time import perf_counter

from benchmarks.kit.forks import Tell, in_forks
from benchmarks.kit.report import Bar, Row, finish, parser
from tests.costs import this_commit
from tests.ranks.remembered import remembered_captures

FOLDER = Path(__file__).parents[1]


def main() -> int:
    """Run them and tell which did not."""
    made = parser("smoke", "The smallest case of every benchmark: does it still run?")
    made.add_argument("names", nargs="*", metavar="NAME", help="these only (default: all)")
    made.add_argument("--seconds", type=float, default=110, help="for one of them at most (default: %(default)s)")
    made.add_argument("--share", type=int, default=1, metavar="N", help="every N-th alone, another for each commit")
    options = made.parse_args()
    names = share_of(options.names or benchmarks(), options.share, this_commit())
    rows = list(rows_of(names, options.seconds))
    broken = sum(row["runs"] != "yes" for row in rows)
    bar, used = Bar("benchmarks that do not run", broken, 0, at_least=False), getrusage(RUSAGE_CHILDREN)
    return finish("smoke", [bar], rows, processor_seconds=used.ru_utime + used.ru_stime)


def benchmarks() -> list[str]:
    """Return the names of all benchmarks: what `python -m benchmarks.NAME` runs, but for this one."""
    packages = {file.parent.name for file in FOLDER.glob("*/__main__.py")}
    modules = {file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__"}
    return sorted((packages | modules) - {Path(__file__).parent.name})


def share_of(names: Sequence[str], shares: int, commit: str) -> Sequence[str]:
    """Return every so manieth of the names; which ones is drawn by the commit, so that all have their turn."""
    return names[int(commit, 16) % shares :: shares]


def module_of(name: str) -> str:
    """Return the module that `python -m benchmarks.NAME` runs."""
    is_package = (FOLDER / name / "__main__.py").exists()
    return f"benchmarks.{name}.__main__" if is_package else f"benchmarks.{name}"


def rows_of(names: Iterable[str], seconds: float) -> Iterable[Row]:
    """Run benchmarks, two at once where there are two cores; yield what each came to, as they end."""
    names = list(names)
    for name in names:
        import_module(module_of(name))  # once, for all forks
    start = perf_counter()
    for name, heard in in_forks(names, _run, len(os.sched_getaffinity(0)), seconds):
        said = heard[-1] if heard else f"died, or did not end within {seconds:.0f} s"
        print(f"{perf_counter() - start:.0f} s: {name}: {said}", file=sys.stderr, flush=True)
        yield {"benchmark": name, "runs": "yes" if said == "yes" else "NO", "why": "" if said == "yes" else said}


def _run(name: str, tell: Tell) -> None:
    """Run the smallest case of a benchmark, as the leader of a group of processes that ends with it."""
    os.setsid()
    sys.argv = [f"benchmarks.{name}", "--smoke"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), remembered_captures():
        try:
            status = import_module(module_of(name)).main()
        except SystemExit as left:
            status = left.code
        except BaseException:
            tell(f"raised {traceback.format_exc()}")
            return
    tell("yes" if status == 0 and _has_report(printed.getvalue()) else f"status {status}: {printed.getvalue()[-2000:]}")


def _has_report(printed: str) -> bool:
    """Tell whether the last line is a benchmark's JSON, with rows."""
    with contextlib.suppress(ValueError, IndexError):
        record = json.loads(printed.splitlines()[-1])
        return {"benchmark", "bars", "rows", "machine"} <= set(record) and bool(record["rows"])
    return False


if __name__ == "__main__":
    raise SystemExit(main())
