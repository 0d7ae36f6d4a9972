"""Does a run that steps, switches and captures again and again keep anything? `python -m tests.program.flat_memory`.

Each rank trains a small model by two variants in turn, and changes a value that the graph fixes every few steps. Prints
what it has at some steps, and as its last line one JSON object; the status is 1 where there is more memory, descriptors
or remains of captures at the end than after a fifth of the run, when as many captures are kept as ever will be.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import hetu_fx
from hetu_fx.show.table import table_text
from tests.ranks.stepping import watched
from tests.spawned import results_of

BAR = 1.02
MORE_OBJECTS = 60
"""For each capture, that may stay: events, and entries of sympy's caches, which are bounded. A trace is hundreds."""
SECONDS = 3000.0
NAMES = ("rows", "columns")


@dataclass(frozen=True)
class Held:
    """What a process has after a step.

    Attributes:
        step: so many are done.
        switches: so many of them ran by another variant than the one before.
        captures: so many there have been.
        memory_bytes: that are resident.
        descriptors: that are open.
        threads: of the operating system.
        environments: of symbolic sizes, of which each trace makes one.
        sources: of graphs, which torch keeps for tracebacks.
        objects: that Python's garbage collector knows, once it has collected.
    """

    step: int
    switches: int
    captures: int
    memory_bytes: int
    descriptors: int
    threads: int
    environments: int
    sources: int
    objects: int


def held_by(world: int, steps: int, per_switch: int, per_capture: int, looks: int) -> Iterator[Held]:
    """Train, and yield what this process has at `looks` steps at equal distances."""
    made = hetu_fx.Plan.data_parallel(range(world)), hetu_fx.Plan.tensor_parallel(range(world))
    plans = [replace(plan, name=name) for plan, name in zip(made, NAMES, strict=True)]
    model, x = watched(*plans, wait_seconds=SECONDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    switches, before = 0, ""
    for step in range(1, steps + 1):
        model.factor = 1.0 + step // per_capture
        model.hetu.switch(NAMES[step // per_switch % len(NAMES)])
        model(x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        switches += before not in ("", model.hetu.current)
        before = model.hetu.current
        if step % (steps // looks) == 0:
            yield _held(step, switches, len(model.hetu.stats["captures"]))


def environments() -> int:
    """Return how many environments of symbolic sizes there are, once garbage is collected."""
    gc.collect()
    return sum(type(one) is ShapeEnv for one in gc.get_objects())


def sources() -> int:
    """Return of how many graphs torch keeps the source."""
    return len(graph_module._loader.eval_cache)


def _held(step: int, switches: int, captures: int) -> Held:
    traces = environments(), sources()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    memory = pages * resource.getpagesize()
    return Held(step, switches, captures, memory, descriptors, threads, *traces, len(gc.get_objects()))


def more(first: Held, last: Held) -> list[str]:
    """Say of what there is more at the last look than at the first; of what is counted, which is exact."""
    spare = {"objects": MORE_OBJECTS * (last.captures - first.captures)}
    return [
        f"{name}: {getattr(first, name)} -> {getattr(last, name)}"
        for name in ("descriptors", "threads", "environments", "sources", "objects")
        if getattr(last, name) > getattr(first, name) + spare.get(name, 0)
    ]


def grown(found: list[Held]) -> list[str]:
    """Say what has grown from the first look to the last."""
    first, last = found[0], found[-1]
    told = more(first, last)
    if last.memory_bytes > BAR * first.memory_bytes:
        told.append(f"memory: {first.memory_bytes} -> {last.memory_bytes} bytes, more than {BAR} times")
    return told


def _look_for_garbage_as_usual() -> None:
    """Look for it as Python does by itself; ranks of tests do so rarely, which lets captures that are gone pile up."""
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)


def _work(rank: int, world: int, store: str, arguments: tuple[int, ...], results: Any) -> None:
    warnings.simplefilter("ignore")
    _look_for_garbage_as_usual()
    if world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results.put((rank, list(held_by(world, *arguments))))


def main() -> int:
    """Run on ranks of this machine, and judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.program.flat_memory", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--per-switch", type=int, default=4, help="steps by one variant (default: %(default)s)")
    parser.add_argument("--per-capture", type=int, default=12, help="steps of one capture (default: %(default)s)")
    options = parser.parse_args()
    arguments = (options.steps, options.per_switch, options.per_capture, 5)
    with tempfile.TemporaryDirectory() as folder:
        found = results_of(_work, options.ranks, options.ranks, f"{folder}/store", arguments, seconds=SECONDS)
    rows = {f"rank {rank}": found[rank] for rank in sorted(found)}
    names = list(asdict(found[0][0]))
    cells = [[rank, *(str(getattr(held, name)) for name in names)] for rank, looks in rows.items() for held in looks]
    print(table_text(["", *names], cells))
    told = {rank: grown(looks) for rank, looks in rows.items()}
    print(json.dumps({"grown": told, "looks": {rank: list(map(asdict, looks)) for rank, looks in rows.items()}}))
    return int(any(told.values()))


if __name__ == "__main__":
    sys.exit(main())
