"""The first steps of a small script on two processes, by hetu_fx and by DDP: each in interpreters of its own.

Processor seconds of rank 0 tell what is done, whatever else the machine does; wall seconds are in the table too. Plans
are tried, as they are unless someone says otherwise, and nothing is known from a run before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from unittest import mock

from benchmarks.kit.fleet import run_workers
from benchmarks.kit.report import Bar, Part, Row
from benchmarks.kit.smallest import least
from benchmarks.preparation.script import DDP, OURS, Marks
from hetu_fx_emulate.emulate import EmulateSpec

PARALLEL_BAR, STEPS_BAR = 1.2, 1.10
ROUNDS, QUICK_ROUNDS = 5, 2


def measured(*, quick: bool) -> Part:
    """Run both in turns, and take the least of each part."""
    runs: dict[str, list[Marks]] = {DDP: [], OURS: []}
    for _ in range(least(QUICK_ROUNDS if quick else ROUNDS, 1)):
        for who, found in runs.items():
            found.append(run(who))
    ours, theirs = least_of(runs[OURS]), least_of(runs[DDP])
    over = ours["steps"][1] / theirs["steps"][1]
    bars = [
        Bar("small: processor seconds of auto_parallelize", ours["make it parallel"][1], PARALLEL_BAR, at_least=False),
        Bar("small: processor seconds of steps over DDP's", over, STEPS_BAR, at_least=False),
    ]
    return bars, [*rows_of(DDP, theirs), *rows_of(OURS, ours)]


def least_of(runs: Sequence[Marks]) -> Marks:
    """Return the least of each part over some runs."""
    parts = {part: [run[part] for run in runs] for part in runs[0]}
    return {part: (min(wall for wall, _ in found), min(used for _, used in found)) for part, found in parts.items()}


def run(who: str) -> Marks:
    """Run two processes; give what rank 0 has found."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder, HETU_FX_CHECK="1"):
        given = ["--part", "small", "--who", who]
        found: Marks = run_workers(
            "preparation", given, EmulateSpec(speeds=(1.0, 1.0)), timeout_seconds=300, limit="affinity"
        )
    return found


def rows_of(who: str, parts: Marks) -> list[Row]:
    """Make a line of each part."""
    return [{"who": who, "step": part, "seconds": wall, "processor": used} for part, (wall, used) in parts.items()]
