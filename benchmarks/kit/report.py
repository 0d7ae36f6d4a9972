"""What a benchmark says at its end: bars, a table, and one line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.kit.smallest import Smoke, is_smallest


@dataclass(frozen=True, slots=True)
class Bar:
    """A number that must reach its bar, from below or from above."""

    name: str
    value: float
    bar: float
    at_least: bool

    @property
    def holds(self) -> bool:
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def __str__(self) -> str:
        sign, verdict = ">=" if self.at_least else "<=", "holds" if self.holds else "MISSED"
        return f"{verdict:6} {self.name}: {self.value:.3f} (bar {sign} {self.bar:g})"


Row = Mapping[str, object]
Part = tuple[Sequence[Bar], Sequence[Row]]
"""What a part of a benchmark has found."""


def parser(name: str, purpose: str) -> argparse.ArgumentParser:
    """Make a benchmark's parser with the options all of them have."""
    made = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=purpose)
    made.add_argument("--quick", action="store_true", help="a shorter run of the same thing")
    made.add_argument("--smoke", action=Smoke)
    return made


def finish(name: str, bars: Sequence[Bar], rows: Sequence[Row], **machine: object) -> int:
    """Print the table, the bars and the JSON line; give the exit status."""
    print(table(rows))
    print(*bars, sep="\n")
    shown = [{**asdict(bar), "holds": bar.holds} for bar in bars]
    record = {"benchmark": name, "bars": shown, "rows": list(rows), "machine": this_machine() | machine}
    print(json.dumps(record), flush=True)
    return 0 if is_smallest() or all(bar.holds for bar in bars) else 1


def table(rows: Sequence[Row]) -> str:
    """Lay rows out in columns, a column per key in order of appearance."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    lines = [heads, *([_cell(row.get(head, "")) for head in heads] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(_line(line, widths) for line in lines)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Give the median over rounds of the ratio within a round, so that a slow minute slows both sides."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def this_machine() -> dict[str, object]:
    """Describe where the numbers come from."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = zip(cells, widths, strict=True)
    first, *rest = [cell.rjust(width) if number else cell.ljust(width) for number, (cell, width) in enumerate(pairs)]
    return "  ".join((first, *rest)).rstrip()
