"""Answers questions beside this process while it goes on, in a process of its own.

A thread would not do: it holds the interpreter's lock, and every op of a step waits for that. Beside a thread that
plans, the steps of a small model took 12 times as long as alone, beside a process as long as alone. The process is
forked, as the workers of a DataLoader are, so that nothing has to be written down for it but the question, and it ends
with this one. It is forked early and kept: whatever this process writes to after a fork is copied first, and a step of
training writes to all that it works with (135 MB and a quarter of a second of a core, in a model of 3.6 M parameters).

Training goes first. On cores that both may use that is what niceness is for; a quota of time, such as containers have,
is shared by all processes whatever their niceness, and so the process takes no more than a part of it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch

from hetu_fx.base.cgroups import own_quota
from hetu_fx.base.machine import start_time
from hetu_fx.errors import HetuFxError, StateError

Question = TypeVar("Question")
Answer = TypeVar("Answer")

_NICENESS = 10
_SHARE_OF_QUOTA = 1 / 3
_LOOK_SECONDS = 0.02  # of its own time, between two looks at how much of it it has taken
_ENDED = "the process in the background ended without a word; was it killed, for want of memory?"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


class Background(Generic[Question, Answer]):
    """A process that knows what this one knows when it is made; questions and answers must be such as pickle can write.

    Nothing is raised before `result`: a process that cannot be started, or has ended, is an answer that has failed.
    """

    def __init__(self, answer: Callable[[Question], Answer]) -> None:
        self._told: bytes | None = None
        self._failure = ""
        try:
            self._connection, self._end = _start(self, answer)
        except OSError as error:
            self._failure, self._end = f"no process could be started: {error}", lambda: None

    def ask(self, question: Question) -> None:
        """Put a question; the answer to the one before has been fetched."""
        self._told = None
        if self._failure:
            return
        try:
            self._connection.send(question)
        except OSError:
            self._failure = _ENDED

    @property
    def is_gone(self) -> bool:
        """Tell, while no question is under way, whether there is nobody to ask: none was started, or it has ended."""
        return bool(self._failure) or self._connection.poll()

    @property
    def is_done(self) -> bool:
        """Tell whether the question is answered. Does not wait."""
        if self._told is None and not self._failure and self._connection.poll():
            try:
                self._told = self._connection.recv_bytes()
            except (EOFError, OSError):
                self._failure = _ENDED
        return self._told is not None or bool(self._failure)

    def result(self) -> Answer:
        """Return the answer, once it is there. Raises what went wrong instead: StateError if it is none of ours."""
        if self._told is None:
            raise StateError(self._failure or _ENDED)
        succeeded, value = pickle.loads(self._told)
        if not succeeded:
            raise value
        return cast(Answer, value)

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._end()


def _start(owner: object, answer: Callable[[Any], Any]) -> tuple[Connection[Any, Any], Callable[[], None]]:
    """Start the process; return the way to it, and what ends it (when its owner is forgotten at the latest)."""
    ours, theirs = Pipe()
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if child == 0:
        _serve(answer, theirs, parent)
    theirs.close()
    return ours, weakref.finalize(owner, _finish, parent, child, start_time(child), ours)


def _finish(parent: int, child: int, start: int | None, connection: Connection[Any, Any]) -> None:
    if os.getpid() != parent:
        return  # a copy of the owner, in another fork
    connection.close()
    if start_time(child) != start:  # the user's program reaps all its children, and the number is another process's
        return
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(answer: Callable[[Any], Any], connection: Connection[Any, Any], parent: int) -> NoReturn:
    """Be the process: never come back to where the other one goes on."""
    try:
        _leave_alone(connection.fileno(), parent)
        while True:
            question = connection.recv()
            quota = own_quota()
            with nullcontext() if quota is None else kept_to(quota * _SHARE_OF_QUOTA):
                told = _outcome(answer, question)
            connection.send_bytes(told)
    finally:
        os._exit(0)  # nothing of the parent's is to be flushed, saved or sent a second time


def _leave_alone(connection: int, parent: int) -> None:
    """Give up what belongs to the parent: its signals, its connections (peers watch for their end), its cores."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    os.closerange(3, connection)
    os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))
    os.nice(_NICENESS)
    gc.freeze()  # or the first collection copies every page of the parent's objects
    torch.set_num_threads(1)  # the threads of the parent's pool are not here


@contextmanager
def kept_to(cores: float) -> Iterator[None]:
    """Let this process run on so many cores at most meanwhile: it sleeps whenever it has run ahead of them.

    A call that does not come back to the interpreter is not interrupted; the sleep after it is longer by as much.
    """
    start, used = time.monotonic(), time.process_time()

    def rest(_signal: int, _frame: object) -> None:
        ahead_seconds = (time.process_time() - used) / cores - (time.monotonic() - start)
        time.sleep(max(0.0, ahead_seconds))

    signal.signal(signal.SIGPROF, rest)
    signal.setitimer(signal.ITIMER_PROF, _LOOK_SECONDS, _LOOK_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0.0)


def _outcome(answer: Callable[[Any], Any], question: Any) -> bytes:
    try:
        return pickle.dumps((True, answer(question)))
    except HetuFxError as error:
        return pickle.dumps((False, error))
    except Exception as error:  # whatever it is, the parent is to say so
        return pickle.dumps((False, StateError(f"{type(error).__name__}: {error}")))
