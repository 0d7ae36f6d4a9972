"""Does one thing beside this process while it goes on, in a process of its own.

A thread would not do: it holds the interpreter's lock, and every op of a step waits for that. Beside a thread that
plans, the steps of a small model took 12 times as long as alone, beside a process as long as alone. The process is
forked, as the workers of a DataLoader are, so that nothing has to be written down for it, and it ends with this one.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch

from hetu_fx.errors import StateError

T = TypeVar("T")

_NICENESS = 10  # training goes first
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


class Background(Generic[T]):
    """An act under way in a process of its own; what it returns must be one that pickle can write.

    Nothing is raised before `result`: a process that cannot be started is an act that has failed.
    """

    def __init__(self, act: Callable[[], T]) -> None:
        self._told, self._is_done = bytearray(), False
        try:
            self._reader, self._end = _start(self, act)
        except OSError as error:
            self._told, self._is_done = bytearray(_written(False, f"no process could be started: {error}")), True
            self._end = lambda: None

    @property
    def is_done(self) -> bool:
        """Take in what has been told so far; tell whether that is all. Does not wait."""
        while not self._is_done:
            try:
                piece = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                return False
            self._told += piece
            self._is_done = not piece
        return True

    def result(self) -> T:
        """Return what the act has returned, once it is done. Raises StateError with what it raised."""
        self.stop()
        if not self._is_done or not self._told:
            raise StateError("the process in the background ended without a word; was it killed, for want of memory?")
        succeeded, value = pickle.loads(self._told)
        if not succeeded:
            raise StateError(str(value))
        return cast(T, value)

    def stop(self) -> None:
        """End the process, if it has not ended yet."""
        self._end()


def _start(owner: object, act: Callable[[], Any]) -> tuple[int, Callable[[], None]]:
    """Start the process; return where it writes to, and what ends it (when its owner is forgotten at the latest)."""
    reader, writer = os.pipe()
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if child == 0:
        _work(act, writer, parent)
    os.close(writer)
    os.set_blocking(reader, False)
    return reader, weakref.finalize(owner, _finish, parent, child, reader)


def _finish(parent: int, child: int, reader: int) -> None:
    if os.getpid() != parent:
        return  # a copy of the owner, in another fork
    os.close(reader)
    with suppress(ProcessLookupError, ChildProcessError):  # the user's program may reap all its children
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _work(act: Callable[[], Any], writer: int, parent: int) -> NoReturn:
    """Be the process: never come back to where the other one goes on."""
    try:
        _leave_alone(writer, parent)
        told = _outcome(act)
        with os.fdopen(writer, "wb") as file:
            file.write(told)
    finally:
        os._exit(0)  # nothing of the parent's is to be flushed, saved or sent a second time


def _leave_alone(writer: int, parent: int) -> None:
    """Give up what belongs to the parent: its signals, its connections (peers watch for their end), its cores."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    os.closerange(3, writer)
    os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
    os.nice(_NICENESS)
    gc.freeze()  # or the first collection copies every page of the parent's objects
    torch.set_num_threads(1)  # the threads of the parent's pool are not here


def _outcome(act: Callable[[], Any]) -> bytes:
    try:
        return _written(True, act())
    except Exception as error:  # whatever it is, the parent is to say so
        return _written(False, f"{type(error).__name__}: {error}")


def _written(succeeded: bool, value: object) -> bytes:
    return pickle.dumps((succeeded, value))
