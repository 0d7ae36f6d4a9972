"""What `model.hetu.save_on_signal` gives: a job that is told to end writes a checkpoint first, all processes together.

One process that has been told is enough. It says so in the message that processes exchange before every step, the first
one after the optimizer's step; all of them save then, and leave the script.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hetu_fx.base.frameworks import torch_optimizer
from hetu_fx.checkpoint.checkpoint import save_model
from hetu_fx.comm_ops.wire.consensus import StepFacts, raise_on_all_ranks
from hetu_fx.errors import StateError
from hetu_fx.switching.runtime import Runtime

SAME_SECONDS = 5.0
"""A signal so soon after the first is the same: torchrun passes on what Slurm has sent to all processes already."""

_log = logging.getLogger("hetu_fx.checkpoint")


class SaveOnSignal:
    """Saves and ends the job between two steps once a process has had a signal; see `Handle.save_on_signal`."""

    def __init__(
        self,
        runtime: Runtime,
        folder: Path,
        optimizer: torch.optim.Optimizer,
        *,
        extra: Callable[[], Mapping[str, Any]],
        signals: Iterable[int],
        status: int,
    ) -> None:
        self.runtime, self.folder, self.optimizer = runtime, folder, torch_optimizer(optimizer)
        self.extra, self.status = extra, status
        self._told_at: float | None = None
        self._number = 0
        self._is_between_steps = True
        self._before: dict[int, Any] = {}
        raise_on_all_ranks(runtime.table, lambda: self._listen(tuple(signals)))
        self._hook = self.optimizer.register_step_post_hook(self._stepped)

    def close(self) -> None:
        """Listen no more: signals do what they did before."""
        self.runtime.unwatch(self)
        self._hook.remove()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def tell(self) -> dict[str, float]:
        """Say whether this rank has been told to end, and a step of the optimizer has just been finished."""
        return {"ending": self._trains and self._is_between_steps and self._told_at is not None}

    def observe(self, facts: StepFacts) -> None:
        """Save and leave the script if a rank says so; else the next step has begun.

        Raises:
            SystemExit: with the status that was asked for.
            CheckpointError: on every rank, if it cannot be written.
        """
        if facts.ending:
            self._save(facts.ending)
        self._is_between_steps = self._is_between_steps and not self._trains

    def _save(self, told: tuple[int, ...]) -> None:
        save_model(self.runtime, self.folder, optimizer=self.optimizer, extra=self.extra())
        if self.runtime.table.rank == 0:
            _log.warning("ranks %s got the signal to end: step %d is saved in %s", told, self.runtime.step, self.folder)
        before = self._before.get(self._number)
        self.close()
        if self._told_at is not None and callable(before) and before is not signal.default_int_handler:
            before(self._number, None)
        raise SystemExit(self.status)

    @property
    def _trains(self) -> bool:
        return self.runtime.model.training and torch.is_grad_enabled()

    def _stepped(self, *_: object) -> None:
        self._is_between_steps = True

    def _listen(self, signals: tuple[int, ...]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise StateError("save_on_signal must be called in the main thread, as signals arrive there")
        for number in signals:
            before = signal.signal(number, self._noted)
            self._before[number] = signal.SIG_DFL if before is None else before

    def _noted(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._told_at is None:
            self._told_at, self._number = now, number
        elif now - self._told_at > SAME_SECONDS:
            self.close()
            os.kill(os.getpid(), number)
