"""Work that is done beside what else a process does, in a thread, one piece after the other in the order given."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from typing import Any

from hetu_fx.base.per_rank import own


class Threads:
    """Starts threads beside the one of a rank, and waits for what they do."""

    def start(self, work: Callable[[], None]) -> None:
        """Do it in a thread that does not keep the process from ending."""
        Thread(target=work, daemon=True).start()

    def wait(self, done: Future[Any], seconds: float | None = None) -> bool:
        """Wait until it is done, at most so long; tell whether it is."""
        return bool(wait([done], seconds).done)


threads = partial(own, Threads)


class SerialExecutor:
    """Runs pieces of work one after the other; those after one that failed fail with the same error.

    Every piece has a thread of its own, which waits for its turn, so none is left when there is nothing to do. Python
    does not wait for them when the process ends: after an error peers must notice at once.
    """

    def __init__(self) -> None:
        self._last: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> SerialTask:
        """Have `work` done after what has been started before."""
        before, done = self._last, Future[None]()
        self._last = done
        threads().start(partial(_run, before, work, done))
        return SerialTask(done)


class SerialTask:
    """A piece of work under way."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        """Wait until it is done, and raise what it raised."""
        threads().wait(self._done)
        self._done.result()

    def is_over(self, seconds: float) -> bool:
        """Wait at most so long; tell whether it has ended, be it by an error."""
        return threads().wait(self._done, seconds)

    @property
    def error(self) -> BaseException | None:
        """Wait until it is done, and return what it raised."""
        threads().wait(self._done)
        return self._done.exception()


def _run(before: Future[None] | None, work: Callable[[], None], done: Future[None]) -> None:
    try:
        if before is not None:
            threads().wait(before)
            before.result()
        work()
    except BaseException as error:  # handed to whoever waits
        done.set_exception(error)
    else:
        done.set_result(None)
