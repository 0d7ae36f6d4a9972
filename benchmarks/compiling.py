"""Seconds until a compiled model is ready, on one core: with nothing kept, and with what the last process kept.

A Llama of 12 blocks, by inductor. Each run is a process of its own; a cold one has an empty folder for temporary files,
in which inductor keeps all that it makes. What is judged is the first step, forward and backward, compiling included;
what comes before it (imports, capture, plan) is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.kit.report import Bar, finish, parser
from benchmarks.kit.smallest import compiler, least

COLD_BAR, WARM_BAR = 15.0, 3.0
PARTS = {
    "trace": ("aot_collect_metadata", "aot_trace_joint_graph", "_recursive_joint_graph_passes"),
    "inductor": ("GraphLowering.run", "GraphLowering.codegen", "_recursive_post_grad_passes"),
    "C++": ("compile_file",),
}
"""What torch counts seconds of, by what is shown."""


def main() -> int:
    """Measure and judge, or be one of the processes that are measured."""
    made = parser("compiling", "Seconds until a compiled model is ready, cold and warm.")
    made.add_argument("--layers", type=int, default=12, help="how many blocks the model has")
    made.add_argument("--measured", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.measured:
        print(json.dumps(measured(options.layers)))
        return 0
    rows = runs(least(options.layers, 2), 1 if options.quick else 3)
    bars = [
        Bar(f"seconds of a first step, {rows[place]['run']}", first(rows[place]), bar, at_least=False)
        for place, bar in enumerate((COLD_BAR, WARM_BAR))
    ]
    return finish("compiling", bars, rows, layers=options.layers)


def first(row: Mapping[str, Any]) -> float:
    """Return the seconds of a row's first step."""
    return float(row["first step"])


def runs(layers: int, rounds: int) -> list[dict[str, Any]]:
    """Measure processes with nothing kept, and with all kept, in turn; give the medians."""
    kept: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for seconds in kept.values():
                seconds.append(process(layers, Path(folder)))
    return [{"run": run, **medians(seconds)} for run, seconds in kept.items()]


def medians(seconds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part."""
    return {part: statistics.median(one[part] for one in seconds) for part in seconds[0]}


def process(layers: int, folder: Path) -> dict[str, float]:
    """Run a process that keeps what it compiles in a folder; give its seconds."""
    command = [sys.executable, "-m", "benchmarks.compiling", "--measured", "--layers", str(layers)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHINDUCTOR_")}
    environment |= {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    if made.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{made.stderr}")
    found: dict[str, float] = json.loads(made.stdout.splitlines()[-1])
    return found


def measured(layers: int) -> dict[str, float]:
    """Train a model for some steps in this process, on one core; give the seconds of each part."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    start = time.perf_counter()
    import torch

    from benchmarks.kit.models import Size, batch, llama

    torch.set_num_threads(1)
    size = Size(width=256, layers=layers, rows=10, tokens=120)
    model, given = llama(size), batch(size.rows, size.tokens)
    made = time.perf_counter()
    import hetu_fx
    from hetu_fx.plans.plan import Plan

    model = hetu_fx.auto_parallelize(model, given, plan=Plan.single(), compile=compiler())
    ready = time.perf_counter()

    def step() -> None:
        model(**given).loss.backward()

    return {
        "imports": made - start,
        "prepare": ready - made,
        "first step": seconds_of(step),
        **parts(),
        "later step": statistics.median(seconds_of(step) for _ in range(7)),
    }


def seconds_of(work: Callable[[], None]) -> float:
    """Do something; give its seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def parts() -> dict[str, float]:
    """Return the seconds of this process by what torch did in them."""
    from torch._dynamo.utils import compilation_time_metrics

    return {part: sum(sum(compilation_time_metrics.get(name, ())) for name in names) for part, names in PARTS.items()}


if __name__ == "__main__":
    sys.exit(main())
