"""The processes of one setting, which run script after script; they are started again after one that went wrong."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from time import monotonic

import torch.distributed as dist

from tests.scripts.script import Script
from tests.scripts.verdict import Outcome, Raised
from tests.scripts.worker import serve
from tests.spawned import forked

START_SECONDS = 120.0


class Crew:
    """As many processes as a setting has ranks; none of them is left behind when the crew is dismissed."""

    def __init__(self, setting: str, world: int) -> None:
        self._setting, self._world, self._number = setting, world, 0
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._orders: list[Connection] = []

    def run(self, script: Script) -> dict[int, Outcome]:
        """Run a script; a rank that says nothing within its bound is not among the outcomes."""
        if not self._processes:
            self._start()
        self._number += 1
        with tempfile.TemporaryDirectory() as folder:
            for orders in self._orders:
                orders.send((script.name, folder, self._number))
            outcomes = self._heard(script.seconds)
        if len(outcomes) < self._world or any(isinstance(outcome, Raised) for outcome in outcomes.values()):
            self.dismiss()
        return outcomes

    def _heard(self, seconds: float) -> dict[int, Outcome]:
        """Return what the ranks say within so many seconds; one that dies says nothing."""
        outcomes: dict[int, Outcome] = {}
        until = monotonic() + seconds
        for rank, orders in enumerate(self._orders):
            try:
                if orders.poll(max(0.0, until - monotonic())):
                    outcomes[rank] = orders.recv()
            except (EOFError, ConnectionError):
                continue
        return outcomes

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self._world):
            mine, theirs = multiprocessing.Pipe()
            process = forked(serve, rank, self._world, self._setting, self._store.port, theirs)
            theirs.close()
            self._processes.append(process)
            self._orders.append(mine)
        started = self._heard(START_SECONDS)
        assert len(started) == self._world, f"only ranks {sorted(started)} have started"

    def dismiss(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._orders = [], []


@contextmanager
def crew(setting: str, world: int) -> Iterator[Crew]:
    """Give the processes of a setting; "" is the plain script's, on one device."""
    made = Crew(setting, world)
    try:
        yield made
    finally:
        made.dismiss()
