"""Jobs in forks of this process, which has imported all that they need: several at once, each with a bound."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from signal import SIGKILL
from time import monotonic
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Tell = Callable[[Any], None]


@dataclass
class _Running(Generic[T]):
    job: T
    process: BaseProcess
    until: float
    heard: list[Any] = field(default_factory=list)


def in_forks(
    jobs: Iterable[T], work: Callable[[T, Tell], None], at_once: int, seconds: float
) -> Iterator[tuple[T, list[Any]]]:
    """Yield each job with all that its work has told, as they end: one ends that says nothing for so many seconds.

    An error of the work is raised here.
    """
    waiting, running = deque(jobs), dict[Connection, _Running[T]]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                mine, process = _started(waiting[0], work)
                running[mine] = _Running(waiting.popleft(), process, monotonic() + seconds)
            _hear(running, seconds)
            for connection, one in list(running.items()):
                if one.until < monotonic():
                    _end(one.process)
                    del running[connection]
                    yield one.job, one.heard
    finally:
        for one in running.values():
            _end(one.process)


def _hear(running: Mapping[Connection, _Running[T]], seconds: float) -> None:
    """Take in what is said within a second."""
    for connection in wait(list(running), timeout=1.0):
        one = running[connection]  # type: ignore[index]
        try:
            one.heard.append(_message(connection.recv()))  # type: ignore[union-attr, call-arg]
            one.until = monotonic() + seconds
        except EOFError:
            one.until = 0.0


def _end(process: BaseProcess) -> None:
    """Kill a process, and what it has started where it leads a group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, SIGKILL)
    process.kill()
    process.join()


def _message(heard: Any) -> Any:
    if isinstance(heard, Exception):
        raise heard
    return heard


def _started(job: T, work: Callable[[T, Tell], None]) -> tuple[Connection, BaseProcess]:
    mine, theirs = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=_work, args=(job, work, theirs))
    process.start()
    theirs.close()
    return mine, process


def _work(job: T, work: Callable[[T, Tell], None], connection: Connection) -> None:
    """Do a job without a word on the terminal, and leave without what others do at an exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        work(job, connection.send)
    except Exception as error:
        connection.send(error)
    connection.close()
    os._exit(0)
