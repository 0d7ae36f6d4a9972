"""What the product looks like, in numbers: `python -m tests.house` prints them, `tests/house/test_house.py` holds them.

With `--since COMMIT`, what they were there beside. `--write` writes them into budget.toml.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.house.budget import FILE, Counts, counts, moved, read, written
from tests.house.measures import MEASURES, function_lengths, named_by_nobody
from tests.house.tree import Tree, at, now
from tests.test_layers import MODULES, ROOT


def files_per_folder() -> Counter[str]:
    """Count the modules in every folder of product, tests and benchmarks."""
    others = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    return Counter(str(path.parent.relative_to(ROOT)) for path in (*MODULES.values(), *others))


def lines_beside() -> dict[str, int]:
    """Count the lines of the packages that use the product and are not part of it."""
    files = {
        name: sorted((ROOT / name).rglob("*.py")) for name in ("hetu_fx_align", "hetu_fx_emulate", "examples/demo")
    }
    return {name: sum(len(path.read_text().splitlines()) for path in paths) for name, paths in files.items()}


def table(found: Counts, before: Counts | None) -> str:
    """Return a row for each folder and one for all, a column for each measure: now, or before and now."""
    folders = sorted({row for rows in found.values() for row in rows} - {"in all"})
    lines = [f"{'':36}" + "".join(f"{name:>{_width(before)}}" for name in found)]
    for row in (*folders, "in all"):
        cells = (_cell(row, rows, None if before is None else before[name]) for name, rows in found.items())
        lines.append(f"{row:36}" + "".join(f"{cell:>{_width(before)}}" for cell in cells))
    return "\n".join(lines)


def _width(before: Counts | None) -> int:
    return 15 if before is None else 18


def _cell(row: str, now: Mapping[str, int], before: Mapping[str, int] | None) -> str:
    count = now.get(row, 0)
    was = count if before is None else before.get(row, 0)
    return f"{was:,} -> {count:,}" if was != count else f"{count:,}" if count else "."


def sizes(tree: Tree) -> dict[str, float]:
    """Return what is not held to a number: how long files and functions are, how full folders, what nobody names."""
    lines = [len(module.text.splitlines()) for module in tree if module.stem != "__init__"]
    lengths = sorted(function_lengths(tree))
    return {
        "files": len(lines),
        "median lines per file": statistics.median(lines),
        "files over 250 lines": sum(count > 250 for count in lines),
        "most files in a folder": max(files_per_folder().values()),
        "median lines per function": statistics.median(lengths),
        "lines of nine functions in ten": lengths[int(len(lengths) * 0.9)],
        "named by nobody in the product": len(named_by_nobody(tree)),
    }


def main(given: Sequence[str] | None = None) -> None:
    """Print the numbers and one line of JSON, or what one measure counts; or write the budget."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--since", metavar="COMMIT", help="print what it was at a commit beside what it is now")
    parser.add_argument("--list", metavar="MEASURE", choices=MEASURES, help="print what a measure counts, by name")
    parser.add_argument("--write", action="store_true", help="write what there is into budget.toml; reasons stay")
    parser.add_argument("--because", metavar="WHY", default="", help="with --write: the reason for what rises")
    options = parser.parse_args(given)
    if options.list:
        print(*sorted(f"{one.folder:32} {one.name}" for one in MEASURES[options.list].find(now())), sep="\n")
        return
    found, before = counts(now()), None if options.since is None else counts(at(options.since))
    if options.write:
        limits = read(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(written(moved(found, limits, options.because)))
    print(table(found, before))
    print("", *(f"{value:8g}  {name}" for name, value in sizes(now()).items()), sep="\n")
    beside = lines_beside()
    print("packages beside, in lines:", ", ".join(f"{name} {count:,}" for name, count in beside.items()))
    in_all = {name: rows["in all"] for name, rows in found.items()}
    was = {} if before is None else {"before": {name: rows["in all"] for name, rows in before.items()}}
    print(json.dumps({"in all": in_all, **was, "by folder": found, "beside": beside, **sizes(now())}))


if __name__ == "__main__":
    main()
