"""`python -m benchmarks.equal`: what torch does on two equal processes, beside what we do there, in one run.

Every process has one thread and a core of its own. All contestants of a setting train the same model by the same rows
with the same optimizer, in turns of a random order. Peak memory is what torch's allocator has out (`kit.memory`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.equal import contest, pipelines, replicas, shards, small
from benchmarks.equal.contest import Contest, Found
from benchmarks.kit.fleet import in_fleet, run_workers, worker_parser, write_result
from benchmarks.kit.report import Bar, finish
from benchmarks.kit.smallest import few
from hetu_fx_emulate.emulate import EmulateSpec

ROUNDS, QUICK_ROUNDS = 15, 5
MEMORY = "memory"  # of a model that is too slow to be timed

Settings = Mapping[str, Callable[[], Contest]]


def settings(*, quick: bool) -> Mapping[str, Settings]:
    """Return all settings by the part that they belong to."""
    return {
        "replicas": {f"data parallel, {size}": partial(replicas.contest, size) for size in replicas.SIZES},
        "shards": {f"tensor parallel, {size}": partial(shards.contest, size) for size in replicas.SIZES},
        "pipelines": {f"{n} micro-batches": partial(pipelines.contest, n) for n in pipelines.MICRO_BATCHES},
        "compiled": {
            f"data parallel, {replicas.SIZES[0]}": partial(replicas.compiled_contest, replicas.SIZES[0]),
            f"tensor parallel, {replicas.SIZES[0]}": partial(shards.compiled_contest, replicas.SIZES[0]),
        },
        "small": {f"a whole loop, {small.SIZE}": small.contest},
        MEMORY: {"GPT-2": partial(replicas.memory_contest, quick=quick)},
    }


def main() -> int:
    """Run the contests and judge them; or be a process of one."""
    made = worker_parser("equal", "Two equal processes: DDP, FSDP2, DTensor and pipelining beside ours.")
    made.add_argument("--part", choices=settings(quick=True), help="only this one")
    options = made.parse_args()
    quick = options.quick
    if options.worker is not None:
        return work(options.worker, options.part, quick=quick)
    chosen = {part: of for part, of in settings(quick=quick).items() if options.part in (None, part)}
    bars, rows = [], []
    for part in few(chosen, 3):
        spec, given = EmulateSpec(speeds=(1.0, 1.0)), ["--part", part, *["--quick"] * quick]
        told = run_workers("equal", given, spec, timeout_seconds=1200, limit="affinity")
        bars += [bar for found in told for bar in found["bars"]]
        rows += [row for found in told for row in found["rows"]]
    return finish("equal", [Bar(**bar) for bar in bars], rows)


def work(result: Path, part: str, *, quick: bool) -> int:
    """Be one process of a part."""
    rounds = 0 if part == MEMORY else QUICK_ROUNDS if quick else ROUNDS
    with in_fleet():
        told = []
        for setting, make in few(settings(quick=quick)[part].items()):
            asked = make()
            found: Found = contest.run(asked, rounds=rounds)
            bars = [asdict(bar) for bar in found.bars(setting, asked)]
            told.append({"bars": bars, "rows": found.rows(setting, asked)})
        write_result(result, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
