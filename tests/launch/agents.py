"""Launchers on machines of namespaces, and what they and their processes have said so far, and when."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.ranks.machines import Machine

SECONDS = 300.0  # a machine may be busy; it is no measurement


class Agent:
    """torchrun on a machine, which runs a script with its arguments."""

    def __init__(
        self, machine: Machine, endpoints: str, nodes: str, script: Sequence[str], nproc: int, *options: str
    ) -> None:
        own = {"HETU_FX_NODE": machine.hostname, "HETU_FX_JOB": "elastic"}
        meet = ["--rdzv-endpoint", endpoints, "--nnodes", nodes, *options]
        self.heard: list[tuple[float, str]] = []
        self.process = machine.start(sys.executable, "-u", *self.command(nproc, meet), *script, **own)
        threading.Thread(target=self._listen, daemon=True).start()

    def command(self, nproc: int, meet: list[str]) -> list[str]:
        """Return what to run on a machine."""
        plain = ["-m", "torch.distributed.run", "--rdzv-backend", "hetu_fx", *meet]
        return [*plain, "--nproc-per-node", str(nproc), "--max-restarts", "20", "--monitor-interval", "0.1"]

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.heard.extend((time.monotonic(), line) for line in self.process.stdout)

    @property
    def lines(self) -> list[str]:
        """Return the lines so far."""
        return [line for _, line in self.heard]

    def when(self, said: str, after: float = 0.0) -> float | None:
        """Return when (time.monotonic) a line was said first after that; None: not so far."""
        return next((at for at, line in list(self.heard) if at > after and re.search(said, line)), None)

    def until(self, said: str) -> str:
        """Wait for a line; return it."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for line in self.lines:
                if re.search(said, line):
                    return line
            time.sleep(0.05)
        raise AssertionError(f"{said!r} was not said:\n{''.join(self.lines[-40:])}")

    def end(self) -> int:
        """Wait for its end; return its status."""
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        """End all processes on the machine at once."""
        self.process.kill()

    def first_process(self) -> int:
        """Return the first process on the machine."""
        return children(self.process.pid)[0]

    def terminate(self) -> None:
        """Send SIGTERM to the first process on the machine."""
        os.kill(self.first_process(), signal.SIGTERM)

    def steps(self) -> list[int]:
        """Return the steps that were told as done, in their order."""
        return [int(step) for step in re.findall(r"^step (\d+) of", "".join(self.lines), re.MULTILINE)]

    def processes(self) -> set[str]:
        """Return the processes in which the script has started."""
        return set(re.findall(r"^start rank .* in (\d+)$", "".join(self.lines), re.MULTILINE))


class Launcher(Agent):
    """`hetu-fx launch` on a machine."""

    def command(self, nproc: int, meet: list[str]) -> list[str]:
        """Return what to run on a machine."""
        return ["-m", "hetu_fx.cli", "launch", *meet, "--nproc", str(nproc), "--min-nproc", "1", "--"]


def children(process: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
