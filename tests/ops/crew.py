"""A process that tries ops one after another; it is started again after one that killed it, or never came to an end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from tests.ops.cell import PLANS, Apart, Finding, findings
from tests.ops.trial import Kind

SECONDS = 600.0
"""What an op may take; it takes a few, and more where others use the machine."""
OPS_PER_PROCESS = 100
"""After so many the process is started anew: captures keep memory."""


def serve(orders: Connection) -> None:
    """Try ops as they are named, until the other end closes."""
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            name, seed, samples = orders.recv()
        except EOFError:
            return
        orders.send(findings(name, seed, samples))


def find_all(names: Sequence[str], seed: int, samples: int) -> Iterator[tuple[str, list[Finding] | Apart]]:
    """Yield what becomes of each op; none takes the others with it."""
    worker = _Worker()
    try:
        for number, name in enumerate(names):
            if number and number % OPS_PER_PROCESS == 0:
                worker.dismiss()
            yield name, worker.find(name, seed, samples)
    finally:
        worker.dismiss()


class _Worker:
    """A process of its own, started when it is first asked."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None

    def find(self, name: str, seed: int, samples: int) -> list[Finding] | Apart:
        """Return what becomes of an op; of one that ends the process, or its time, that it does."""
        if self._process is None:
            self._start()
        try:
            self._orders.send((name, seed, samples))
            if self._orders.poll(SECONDS):
                found: list[Finding] | Apart = self._orders.recv()
                return found
            why = f"no end within {SECONDS:.0f} s"
        except (EOFError, ConnectionError):
            why = "the process died"
        self.dismiss()
        return [Finding(plan, "", Kind.CRASH, why) for plan in PLANS]

    def _start(self) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def dismiss(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None
