"""Ranks that are threads of one process and take turns: `run_in_threads` runs something as every rank of a world.

For tests, `hetu-fx verify --ranks` and bug reports: they run what processes run, numbers are the same, times mean
nothing. One runs until it waits for another, then the next one that can goes on. So a run of many is the same every
time, and where nobody can go on it is known at once who waits for what.

Messages: a send and a receive of one tag meet, and what stands at the sender then is copied. As with gloo, a message
leaves when its receive is posted: a sender that writes to it meanwhile sends something else.

Collectives: calls of one group meet by their number, and the last one to come does what all came for, sums in the order
of the ranks. Calls that do not fit together are refused as soon as the second one comes, on all ranks that come, with
what each asked for: processes would mix values, wait for ever, or be ended by gloo.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx.base.per_rank import Belongings, as_rank, no_threads_are_ranks
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, activate
from hetu_fx.comm_ops.wire.serial_threads import Threads
from hetu_fx.comm_ops.wire.transport import WorldMessage
from hetu_fx.errors import CommError, DivergedError


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


class ThreadRoute(NamedTuple):
    """Messages that arrive in the order in which they were sent."""

    group: Members
    sender: int
    receiver: int
    tag: int

    def __str__(self) -> str:
        return f"rank {self.sender} to rank {self.receiver} with tag {self.tag:#x} in {self.group}"


@dataclass(slots=True, eq=False)
class PendingSend:
    """One end of a message: what is sent, or the room for it."""

    x: Flat
    problem: str = ""
    is_done: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nobody has to wait any longer."""
        return self.is_done or bool(self.problem)

    def check(self) -> None:
        """Raise DivergedError where the other end is of another form."""
        if self.problem:
            raise DivergedError(self.problem)


@dataclass
class ThreadMailbox:
    """The messages of which one end is there."""

    sent: dict[ThreadRoute, deque[PendingSend]] = field(default_factory=dict)
    awaited: dict[ThreadRoute, deque[PendingSend]] = field(default_factory=dict)

    def send(self, way: ThreadRoute, x: Flat) -> PendingSend:
        """Send a buffer; it stays as it is until the message is done."""
        return _met(way, PendingSend(x), self.sent, self.awaited, sends=True)

    def receive(self, way: ThreadRoute, x: Flat) -> PendingSend:
        """Receive a buffer, in `x`."""
        return _met(way, PendingSend(x), self.awaited, self.sent, sends=False)

    def left(self) -> list[str]:
        """Describe the messages of which the other end never came."""
        unread = [f"{len(found)} from {way} never received" for way, found in self.sent.items()]
        return unread + [f"{len(found)} from {way} never sent" for way, found in self.awaited.items()]


def _met(
    way: ThreadRoute,
    own: PendingSend,
    queue: dict[ThreadRoute, deque[PendingSend]],
    others: dict[ThreadRoute, deque[PendingSend]],
    *,
    sends: bool,
) -> PendingSend:
    """Put one end to the other if that is there, else in the queue."""
    if way not in others:
        queue.setdefault(way, deque()).append(own)
        return own
    other = others[way].popleft()
    if not others[way]:
        del others[way]
    _deliver(way, *((own, other) if sends else (other, own)))
    return own


def _deliver(way: ThreadRoute, sent: PendingSend, awaited: PendingSend) -> None:
    forms = [f"{x.tensor.numel()} of {x.tensor.dtype}" for x in (sent.x, awaited.x)]
    if forms[0] != forms[1]:
        problem = f"a message from {way} is sent as {forms[0]} and awaited as {forms[1]}"
        sent.problem = awaited.problem = problem
        raise DivergedError(problem)
    with torch.no_grad():
        awaited.x.copy_from(sent.x)
    sent.is_done = awaited.is_done = True


@dataclass(frozen=True, slots=True)
class Members:
    """A group: the ranks in it, in order, and a name that tells it from others of the same ranks."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}"


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """What a rank asks for: an operation, and what must be the same on all, in words."""

    name: str
    form: str = ""

    def __str__(self) -> str:
        return self.name + (f" of {self.form}" if self.form else "")


Act = Callable[[Mapping[int, Any]], None]
"""Does what all have come for, with what each has brought, by rank."""


@dataclass(slots=True, eq=False)
class ThreadMeeting:
    """One call of a group, while not all of its members have come."""

    group: Members
    number: int
    calls: dict[int, CollectiveCall] = field(default_factory=dict)
    brought: dict[int, Any] = field(default_factory=dict)
    is_done: bool = False

    def come(self, rank: int, call: CollectiveCall, brings: Any, act: Act) -> None:
        """Take part; the last one acts. Raises DivergedError where another rank has come for something else."""
        self.calls[rank], self.brought[rank] = call, brings
        self.check()
        if len(self.calls) == len(self.group.ranks):
            act({rank: self.brought[rank] for rank in self.group.ranks})
            self.is_done = True

    def check(self) -> None:
        """Raise DivergedError where calls do not fit together."""
        if len(set(self.calls.values())) > 1:
            told = "\n".join(f"  rank {rank}: {call}" for rank, call in sorted(self.calls.items()))
            raise DivergedError(f"unlike calls, number {self.number} of {self.group}:\n{told}")

    @property
    def is_over(self) -> bool:
        """Whether nobody has to wait any longer: all have come, or will not meet."""
        return self.is_done or len(set(self.calls.values())) > 1

    def __str__(self) -> str:
        call = next(iter(self.calls.values()))
        missing = [rank for rank in self.group.ranks if rank not in self.calls]
        return f"ranks {missing} in call {self.number} of {self.group}, {call}"


class ThreadMeetings:
    """The calls of all groups that have begun and are not done."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[Members, int]] = Counter()
        self._open: dict[tuple[Members, int], ThreadMeeting] = {}

    def come(self, group: Members, rank: int, call: CollectiveCall, brings: Any, act: Act) -> ThreadMeeting:
        """Make a rank's next call of a group."""
        self._calls[group, rank] += 1
        number = self._calls[group, rank]
        meeting = self._open.setdefault((group, number), ThreadMeeting(group, number))
        meeting.come(rank, call, brings, act)
        if meeting.is_done:
            del self._open[group, number]
        return meeting

    def left(self) -> list[str]:
        """Describe the calls that not all members have made."""
        return [f"{sorted(meeting.calls)} wait for {meeting}" for meeting in self._open.values()]


_REDUCE: Mapping[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class InProcessTransport:
    """What the threads of a run have together: whose turn it is, and what is under way."""

    def __init__(self, size: int) -> None:
        self.world = Members("world", tuple(range(size)))
        self.turns, self.meetings, self.mail = RoundRobin(), ThreadMeetings(), ThreadMailbox()

    def check_empty(self) -> None:
        """Raise CommError where something is under way that nobody has waited for."""
        left = [*self.meetings.left(), *self.mail.left()]
        if left:
            raise CommError("the ranks have ended, but what they began has not:\n  " + "\n  ".join(left))


class ThreadWork:
    """A call under way: a collective, or one end of a message; `what` is waited for."""

    def __init__(self, pending: ThreadMeeting | PendingSend, what: object, turns: RoundRobin) -> None:
        self._pending, self._what, self._turns = pending, what, turns

    def wait(self) -> None:
        """Let others go on until those it needs are there. Raises DivergedError where they come for something else."""
        if not self._pending.is_over:
            self._turns.wait_until(lambda: self._pending.is_over, self._what)
        self._pending.check()

    def is_completed(self) -> bool:
        """Tell whether they are."""
        return self._pending.is_over


class ThreadTransport:
    """The side of one rank."""

    def __init__(self, office: InProcessTransport, rank: int) -> None:
        self._office, self._rank = office, rank

    def connect(self, members: Sequence[int], name: str, timeout: timedelta) -> Members:
        """Return the group; nobody has to meet for it."""
        return Members(name, tuple(members))

    def connects_late(self, device: torch.device) -> bool:
        """Say no: nothing has to be connected."""
        return False

    def is_native(self, group: Members, device: torch.device) -> bool:
        """Say yes for all but the host, from which messages go as over gloo."""
        return device.type != "cpu"

    def device(self, group: Members) -> torch.device:
        """Return the host."""
        return torch.device("cpu")

    def all_reduce(
        self, x: Flat, group: Members, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, is_async: bool = False
    ) -> ThreadWork | None:
        """Reduce in the order of the ranks."""
        reduce = _REDUCE[op]
        return self._meet(
            group, CollectiveCall("all_reduce", f"{_form(x)}, {op}"), x.tensor, partial(_all_reduce, reduce), is_async
        )

    def all_gather(self, parts: list[Flat], x: Flat, group: Members, *, is_async: bool = False) -> ThreadWork | None:
        """Copy each one's to all."""
        return self._meet(group, CollectiveCall("all_gather", _form(x, parts)), (parts, x), _all_gather, is_async)

    def broadcast(self, x: Flat, source: int, group: Members) -> ThreadWork | None:
        """Copy one's to the others."""
        call = CollectiveCall("broadcast", f"{_form(x)} from rank {source}")
        return self._meet(group, call, x.tensor, partial(_broadcast, source), True)

    def reduce_scatter(
        self, result: Flat, parts: list[Flat], group: Members, *, is_async: bool = False
    ) -> ThreadWork | None:
        """Sum what is for each, in the order of the ranks."""
        call = CollectiveCall("reduce_scatter", _form(result, parts))
        return self._meet(group, call, (result, parts), _reduce_scatter, is_async)

    def post(
        self, receives: Sequence[WorldMessage], sends: Sequence[WorldMessage], group: Members
    ) -> tuple[list[ThreadWork], list[ThreadWork]]:
        """Put them in the mail."""
        mail, turns, own = self._office.mail, self._office.turns, self._rank
        arriving = [(ThreadRoute(group, peer, own, tag), x) for peer, x, tag in receives]
        leaving = [(ThreadRoute(group, own, peer, tag), x) for peer, x, tag in sends]
        return (
            [ThreadWork(mail.receive(way, x), f"a message from {way}", turns) for way, x in arriving],
            [ThreadWork(mail.send(way, x), f"its message from {way} to be received", turns) for way, x in leaving],
        )

    def _meet(self, group: Members, call: CollectiveCall, brings: Any, act: Act, is_async: bool) -> ThreadWork | None:
        meeting = self._office.meetings.come(group, self._rank, call, brings, act)
        work = ThreadWork(meeting, meeting, self._office.turns)
        if is_async:
            return work
        work.wait()
        return None


def _form(buffer: Flat, buffers: Sequence[Flat] = ()) -> str:
    """Tell what must be the same on all: of a device's tensors what each gives or gets, as NCCL takes unequal ones."""
    x, parts = buffer.tensor, [each.tensor for each in buffers]
    size = [part.numel() for part in parts] if parts and x.device.type != "cpu" else x.numel()
    return f"{size} of {x.dtype}"


@torch.no_grad()
def _all_reduce(reduce: Callable[[Tensor, Tensor], Tensor], brought: Mapping[int, Tensor]) -> None:
    first, *others = brought.values()
    total = first.clone()
    for other in others:
        total = reduce(total, other)
    for x in brought.values():
        x.copy_(total)


@torch.no_grad()
def _all_gather(brought: Mapping[int, tuple[list[Flat], Flat]]) -> None:
    own = [x for _, x in brought.values()]
    for parts, _ in brought.values():
        for part, x in zip(parts, own, strict=True):
            part.copy_from(x)


@torch.no_grad()
def _broadcast(source: int, brought: Mapping[int, Tensor]) -> None:
    for rank, x in brought.items():
        if rank != source:
            x.copy_(brought[source])


@torch.no_grad()
def _reduce_scatter(brought: Mapping[int, tuple[Flat, list[Flat]]]) -> None:
    for place, (result, _) in enumerate(brought.values()):
        first, *others = (parts[place].tensor for _, parts in brought.values())
        total = first.clone()
        for other in others:
            total += other
        result.tensor.copy_(total)


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
    belongings[Threads] = _Aside(office, rank, belongings)
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
