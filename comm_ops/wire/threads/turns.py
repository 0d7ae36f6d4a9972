"""Threads that take turns: one runs until it waits for another, then the next one that can goes on.

So a run of many is the same every time, and where nobody can go on it is known at once who waits for what.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetu_fx.errors import DivergedError


@dataclass(frozen=True, slots=True)
class ThreadWait:
    """What a thread waits for: whether it is there, and what it is."""

    is_over: Callable[[], bool]
    what: object


@dataclass(slots=True, eq=False)
class Thread:
    """One of the threads: `name` says which, `wait` what it waits for, if it does."""

    name: str
    work: Callable[[], Any]
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    wait: ThreadWait | None = None
    has_ended: bool = False
    made: Any = None
    error: BaseException | None = None

    @property
    def can_go(self) -> bool:
        """Tell whether it has work and waits for nothing that is not there."""
        return not self.has_ended and (self.wait is None or self.wait.is_over())

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.name} has ended by {type(self.error).__name__}: {self.error}"
        if self.has_ended:
            return f"{self.name} has ended"
        return f"{self.name} {'is at work' if self.wait is None else f'waits for {self.wait.what}'}"


class RoundRobin:
    """Runs pieces of work in threads that take turns, in the order that they are given in, round and round.

    Attributes:
        seconds: after which a thread that begins to wait gives up, and so all do; None: never.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._begun = time.monotonic()
        self._threads: list[Thread] = []
        self._started: list[threading.Thread] = []
        self._now = 0
        self._errors: list[BaseException] = []
        self._stuck = ""

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run them, and return what they have made.

        Raises:
            BaseException: the first error of any; that others waited for it in vain is no error of theirs.
        """
        self._begun = time.monotonic()
        for number, work in enumerate(works):
            self.start(f"rank {number}", work)
        self._threads[0].go.release()
        for thread in self._started:  # which may become more
            thread.join()
        if self._errors:
            raise self._errors[0]
        return [thread.made for thread in self._threads[: len(works)]]

    def start(self, name: str, work: Callable[[], Any]) -> None:
        """Have one more thread, which begins when its turn comes."""
        thread = Thread(name, work)
        self._threads.append(thread)
        self._started.append(threading.Thread(target=self._run, args=(thread,), daemon=True))
        self._started[-1].start()

    def wait_until(self, is_over: Callable[[], bool], what: object) -> None:
        """Let the others go on until it is over; called by the thread whose turn it is. `what` it is, is read later.

        Raises:
            DivergedError: nobody can go on; says what everybody waits for.
            TimeoutError: all have run for more than `seconds`.
        """
        if self.seconds is not None and time.monotonic() - self._begun >= self.seconds:
            raise TimeoutError(f"given up after {self.seconds:.1f} s")
        if is_over():
            return
        thread = self._threads[self._now]
        thread.wait = ThreadWait(is_over, what)
        self._hand_over()
        thread.go.acquire()
        is_there, thread.wait = thread.wait.is_over(), None
        if not is_there:
            raise DivergedError(self._stuck)

    def _run(self, thread: Thread) -> None:
        thread.go.acquire()
        try:
            thread.made = thread.work()
        except BaseException as error:  # raised by `run`, where it was the first
            thread.error = error
            self._errors.append(error)
        thread.has_ended = True
        self._hand_over()

    def _hand_over(self) -> None:
        """Let the next one go on; where none can, all that wait get an error, one after the other."""
        count = len(self._threads)
        circle = itertools.chain(range(self._now + 1, count), range(self._now + 1))
        following = next((number for number in circle if self._threads[number].can_go), None)
        if following is None:
            following = next((number for number, thread in enumerate(self._threads) if not thread.has_ended), None)
            if following is None:
                return
            self._stuck = self._stuck or "no rank can go on:\n" + "\n".join(f"  {thread}" for thread in self._threads)
        self._now = following
        self._threads[following].go.release()
