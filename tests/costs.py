"""How long files of tests take: `pytest --write-costs`.

Runs of several workers start the longest first: workers take whole files, and where a long one is started last, all but
one of them wait for it. And `pytest --shares N` runs all short files, but of the long ones only a share, another for
each commit.
"""

from __future__ import annotations

import heapq
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("costs.toml")
LEAST_SECONDS = 2.0
"""Files that take less are not in the table."""

LONG_SECONDS = 5.0
"""Files that take as long, or longer, are run in shares."""

_HEAD = "# Seconds by file, of one run on two cores. Written by pytest --write-costs.\n"


def part(markers: str) -> str:
    """Name the part of the suite that an expression of markers selects."""
    return "distributed" if markers.startswith("distributed") else "plain"


def read_costs(markers: str, table: Path = TABLE) -> Mapping[str, float]:
    """Return the seconds that files of a part of the suite take."""
    return tomllib.loads(table.read_text())[part(markers)]


def longest_first(items: list[pytest.Item], costs: Mapping[str, float]) -> None:
    """Put tests of files that take long before others, which keep their order."""
    items.sort(key=lambda item: -costs.get(item.path.relative_to(ROOT).as_posix(), 0.0))


def left_out(costs: Mapping[str, float], shares: int, commit: str) -> frozenset[str]:
    """Return the long files that are not in a commit's share; shares take about as long as each other."""
    loads = [(0.0, share) for share in range(shares)]
    own, others = int(commit, 16) % shares, set[str]()
    for file, seconds in sorted(costs.items(), key=lambda entry: (-entry[1], entry[0])):
        if seconds < LONG_SECONDS:
            break
        load, share = loads[0]
        heapq.heapreplace(loads, (load + seconds, share))
        if share != own:
            others.add(file)
    return frozenset(others)


def this_commit() -> str:
    """Return the commit that is checked out, in hexadecimal digits; "0" where that is not known."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "0"


class CostRecorder:
    """Adds up how long tests of each file take, and writes it when the run is over."""

    def __init__(self, markers: str, table: Path = TABLE) -> None:
        self.markers, self.table = markers, table
        self.seconds = defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add what one phase of a test has taken."""
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the table, in which files that have not run, and exist, stay as they were."""
        parts = {name: dict(costs) for name, costs in tomllib.loads(self.table.read_text()).items()}
        parts[part(self.markers)].update(self.seconds)
        self.table.write_text(_HEAD + "".join(_section(name, costs.items()) for name, costs in parts.items()))


def _section(name: str, costs: Iterable[tuple[str, float]]) -> str:
    kept = [(file, cost) for file, cost in costs if cost >= LEAST_SECONDS and (ROOT / file).exists()]
    lines = [f'"{file}" = {cost:.0f}' for file, cost in sorted(kept, key=lambda entry: (-entry[1], entry[0]))]
    return "\n".join(["", f"[{name}]", *lines, ""])
