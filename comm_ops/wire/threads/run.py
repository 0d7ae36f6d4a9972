"""Run something as every rank of a world, in threads of this process that take turns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from hetu_fx.base.per_rank import Belongings, as_rank, no_threads_are_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable, activate
from hetu_fx.comm_ops.wire.serial_threads import Threads, threads
from hetu_fx.comm_ops.wire.threads.thread_transport import InProcessTransport, ThreadTransport

T = TypeVar("T")


def run_in_threads(size: int, work: Callable[[GroupTable], T], seconds: float | None = None) -> list[T]:
    """Run `work` with the table of every rank of a world of `size`, and return what each has made, by rank.

    One runs at a time, until it waits for another, in an order that is always the same. All is on the host. After
    `seconds` a rank that begins to wait gives up.

    Raises:
        DivergedError: ranks make calls that do not fit together, or wait for each other in vain; says who and for what.
        TimeoutError: it takes more than `seconds`.
        CommError: a message was sent that nobody has received.
        Exception: the first error of a rank.
    """
    office = InProcessTransport(size)
    office.turns.seconds = seconds
    try:
        made: list[T] = office.turns.run([partial(_as_rank, office, rank, size, work) for rank in range(size)])
    finally:
        no_threads_are_ranks()
    office.check_empty()
    return made


def _as_rank(office: InProcessTransport, rank: int, size: int, work: Callable[[GroupTable], T]) -> T:
    table = GroupTable.over(ThreadTransport(office, rank), office.world, rank, size)
    belongings: Belongings = {}
    belongings[threads] = _Aside(office, rank, belongings)
    with as_rank(belongings):
        activate(table)
        return work(table)


class _Aside(Threads):
    """Threads beside that of a rank, which take turns with all others."""

    def __init__(self, office: InProcessTransport, rank: int, belongings: Belongings) -> None:
        self._turns, self._rank, self._belongings = office.turns, rank, belongings

    def start(self, work: Callable[[], None]) -> None:
        """Do it in a thread that works for this rank too."""

        def run() -> None:
            with as_rank(self._belongings):
                work()

        self._turns.start(f"a thread of rank {self._rank}", run)

    def wait(self, done: Future[Any], seconds: float | None = None) -> bool:
        """Let others go on until it is done: what a rank waits for comes, or nobody can go on."""
        self._turns.wait_until(done.done, f"a thread of rank {self._rank}")
        return True
