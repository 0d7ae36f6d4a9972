"""Runs the cells of one family on ranks that are forked from this process, which has captured the model already.

If a cell ends in another way than by hetu_fx's own errors (which all ranks raise together), or does not end, what is
under way between the ranks is unknown: they are stopped, and the cells that are left run on new ones.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.families.cells import WORLD, Subject
from benchmarks.families.families import Family
from hetu_fx.errors import HetuFxError
from hetu_fx.graph.graph import Graph
from hetu_fx.program import captures

SECONDS_PER_CELL = 240
SECONDS_PER_WAIT = 200
SECONDS_PER_LOOK = 0.2
FORK = get_context("fork")

Record = Mapping[str, Any]


def run_plans(family: Family, graph: Graph, plans: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Run a family under plans; yield what each came to, the worst of all ranks."""
    left = list(plans)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            for plan, record in _run_until_broken(family, graph, tuple(left), Path(folder)):
                left.remove(plan)
                yield plan, record


def _run_until_broken(family: Family, graph: Graph, plans: Sequence[str], folder: Path) -> Iterator[tuple[str, Record]]:
    ranks = [FORK.Process(target=_be_rank, args=(rank, family, graph, plans, folder)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    try:
        for plan in plans:
            record = _wait_for(plan, folder, ranks)
            yield plan, record
            if "broken" in record:
                return
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _wait_for(plan: str, folder: Path, ranks: Sequence[BaseProcess]) -> Record:
    """Wait until all ranks have told of a plan, or cannot any more."""
    start = time.monotonic()
    while True:
        alive = [rank.is_alive() for rank in ranks]  # asked first: who has told may end
        records = [_told(folder, rank, plan) for rank in range(WORLD)]
        told = [record for record in records if record is not None]
        broken = next((record for record in told if "broken" in record), None)
        if broken is not None or len(told) == WORLD:
            return broken or _worst(told)
        if any(record is None and not lives for record, lives in zip(records, alive, strict=True)):
            return {"broken": "a process died"}
        if time.monotonic() - start > SECONDS_PER_CELL:
            return {"broken": f"no end after {SECONDS_PER_CELL} s"}
        time.sleep(SECONDS_PER_LOOK)


def _told(folder: Path, rank: int, plan: str) -> Record | None:
    with suppress(FileNotFoundError, json.JSONDecodeError):
        record: Record = json.loads((folder / f"{rank} {plan}").read_text())
        return record
    return None


def _worst(told: Sequence[Record]) -> Record:
    refused = next((record for record in told if "refused" in record), None)
    return refused or max(told, key=lambda record: max(record["differences"].values()))


def _be_rank(rank: int, family: Family, graph: Graph, plans: Sequence[str], folder: Path) -> None:
    patience = timedelta(seconds=SECONDS_PER_WAIT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=patience)
    subject = Subject(family)
    with mock.patch.object(captures, "capture", return_value=graph):
        for plan in plans:
            start = time.perf_counter()
            record = _attempt(subject, plan)
            (folder / f"{rank} {plan}").write_text(json.dumps({"seconds": time.perf_counter() - start, **record}))
            if "broken" in record:
                break
    os._exit(0)  # a process whose peers failed must not wait for them in a destructor


def _attempt(subject: Subject, plan: str) -> Record:
    try:
        return {"differences": subject.try_plan(plan)}
    except HetuFxError as error:
        return {"refused": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    except Exception as error:  # to be told, not to end the run
        return {"broken": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
