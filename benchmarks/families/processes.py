"""A family on trial under a plan by ranks that are processes, over gloo.

Each trains it plainly, captures it, and runs its part of every step. What ranks have is put together here.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from benchmarks.families.cells import AS_RANKS, Subject, worst_differences
from benchmarks.families.family import Family
from benchmarks.families.trials import CAPTURED, CRASH, DIED, NOT_PLAIN, PLAIN, REFUSED, Record, attempt, try_family
from benchmarks.kit.forks import Tell, in_forks
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.lockstep import join_ranks

WORLD = 2
HOW = replace(AS_RANKS, ranks=WORLD, rows=(5, 3))
SILENCE = 4
"""For how many times the seconds of a cell a trial may say nothing: its ranks tell three steps, each within those."""


def try_as_processes(family: Family, plans: Sequence[str], seconds: float, tell: Tell) -> None:
    """Try a family under plans, each by ranks of its own; tell what each came to."""
    os.setsid()  # what ends this process ends its ranks
    for plan in plans:
        with TemporaryDirectory() as folder:
            work = partial(_be_rank, family, plan, Path(folder), seconds)
            heard = {rank: dict(told) for rank, told in in_forks(range(WORLD), work, WORLD, seconds)}
        for step in (PLAIN, CAPTURED):
            tell((step, of_ranks([heard[rank].get(step, DIED) for rank in range(WORLD)])))
        found = [heard[rank].get(plan, DIED) for rank in range(WORLD)]
        tell((plan, attempt(partial(_compared, found))))


def _be_rank(family: Family, plan: str, folder: Path, seconds: float, rank: int, tell: Tell) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HETU_FX_WAIT_SECONDS": str(seconds)}
    store, timeout = f"file://{folder}/store", timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timeout)
    table = GroupTable()

    def run(subject: Subject, plan: str) -> Record:
        made = subject.try_rank(plan, table)
        dist.barrier()  # nobody leaves while another waits for its last message
        return {"made": pickle.dumps((made, subject.alone))}  # bytes: a tensor would be sent as this process's memory

    try_family(family, (plan,), HOW, run, tell)


def of_ranks(records: Sequence[Record]) -> Record:
    """Return what ranks came to in a step: what stops all of them stops it; what stops some is a crash."""
    for kind in (CRASH, NOT_PLAIN, REFUSED):
        failed = [record for record in records if kind in record]
        if failed:
            if kind == CRASH or len(failed) == len(records):
                return failed[0]
            return {CRASH: f"{len(failed)} of {WORLD} ranks: {failed[0][kind]}"}
    return records[0]


def _compared(records: Sequence[Mapping[str, bytes]]) -> Record:
    told = of_ranks(records)
    if "made" not in told:
        return told
    ranks = [pickle.loads(record["made"]) for record in records]
    return {"differences": worst_differences(join_ranks([made for made, _ in ranks]), ranks[0][1])}
