"""Plays scripts in processes that are forked from a server which has imported what they need."""

from __future__ import annotations

import io
import os
import runpy
import sys
import traceback
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic

from tests.spawned import prepared

Played = tuple[bool, str]


def play(rank: int, world: int, port: str, script: str, told: Connection) -> None:
    """Be one process of a script: run it as `__main__`, and tell whether it ended well, and what it printed."""
    if world > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    sys.argv = [script]
    printed, well = io.StringIO(), False
    with redirect_stdout(printed):
        try:
            runpy.run_path(script, run_name="__main__")
            well = True
        except BaseException:
            traceback.print_exc(file=sys.stdout)
    told.send((well, printed.getvalue()))
    told.poll(None)  # not to leave before the others: a process that ends closes their connections


def played(script: Path, world: int, port: str, seconds: float) -> list[Played]:
    """Return what each of `world` processes came to; one that says nothing in time has failed. None is left behind."""
    context = prepared()
    processes: list[BaseProcess] = []
    ends: list[Connection] = []
    try:
        for rank in range(world):
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=play, args=(rank, world, port, str(script), theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            ends.append(mine)
        until = monotonic() + seconds
        return [_heard(end, until) for end in ends]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _heard(end: Connection, until: float) -> Played:
    try:
        return end.recv() if end.poll(max(0.0, until - monotonic())) else (False, "said nothing in time")
    except EOFError:
        return False, "died"
