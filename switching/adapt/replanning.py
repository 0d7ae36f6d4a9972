"""Makes a plan on rank 0 while all ranks go on training, and hands it to all of them before the same step.

Every rank asks for the same plan, from facts that all have agreed on. Rank 0 alone makes it, in a process of its own
(graphs of examples of unequal sizes differ, so that one rank plans for all); its facts of a step say that the plan is
ready, and so all ranks receive it then. What went wrong in planning is received in its place.

The process deduces the plan's graph too, which is the same for all ranks and most of what the first step under the plan
would wait for (three quarters to nine tenths of making its graphs); it travels with the plan, as 0.3 MB for 550 nodes.
The process is one that `begin` has started before training; one that is started later slows the step that follows.

A thread would not do: it holds the interpreter's lock, and every op of a step waits for that. Beside a thread that
plans, the steps of a small model took 12 times as long as alone, beside a process as long as alone. The process is
forked, as the workers of a DataLoader are, so that nothing has to be written down for it but the question, and it ends
with this one. It is forked early and kept: whatever this process writes to after a fork is copied first, and a step of
training writes to all that it works with (135 MB and a quarter of a second of a core, in a model of 3.6 M parameters).

Training goes first. On cores that both may use that is what niceness is for; a quota of time, such as containers have,
is shared by all processes whatever their niceness, and so the process takes no more than a part of it.

What a plan is made for, besides model and devices, and which plans have been made: the same on every rank.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from time import perf_counter
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch

from hetu_fx.base.cgroups import own_quota
from hetu_fx.base.machine import start_time
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import broadcast_from_rank0
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CommError, HetuFxError, StateError
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.adapt.tried import TrialResult, TriedPlans
from hetu_fx.switching.variants import Variants

Planner = Callable[[Cluster, str], Plan]


@dataclass(frozen=True)
class MadePlan:
    """A plan, the seconds that making it took (0 where it was known), what has been deduced for it, and what was found
    when it was tried (None: it was known)."""

    plan: Plan
    seconds: float = 0.0
    deduced: bytes | None = None
    tried: TrialResult | None = None


@dataclass(frozen=True)
class PlanRequest:
    """A plan that is wanted: for what, under which name, and before which step it was asked for.

    `least_gain` is the share by which it must be faster than what runs, None where it is taken in any case.
    """

    conditions: Conditions
    name: str
    step: int
    least_gain: float | None = None


_Wanted = tuple[
    PlanRequest, Cluster, Collection[Plan]
]  # a plan, for a cluster; the compute layouts that are known before


class Replanning:
    """The plan that is being made, if any; `asked` is the same on every rank.

    Args:
        table: all ranks.
        planner: makes a plan of a given name for a cluster; called on rank 0 only.
        variants: those there are; they deduce of a plan what takes long and is the same for all ranks, on rank 0 too.
        tried: tries a plan where it is made: one that is wrong is none.
    """

    def __init__(self, table: GroupTable, planner: Planner, variants: Variants, tried: TriedPlans) -> None:
        self.table, self.planner, self.variants, self.tried = table, planner, variants, tried
        self.asked: PlanRequest | None = None
        self._background: Background[_Wanted, MadePlan] | None = None

    def begin(self) -> None:
        """Start the process in which plans will be made."""
        if self.table.rank == 0 and (self._background is None or self._background.is_gone):
            self._background = Background(self._made)

    def end(self) -> None:
        """End that process."""
        if self._background is not None:
            self._background.stop()
        self._background = None

    @property
    def has_plan(self) -> bool:
        """Tell whether this rank has made the plan."""
        return self.asked is not None and self._background is not None and self._background.is_done

    def ask(self, asked: PlanRequest, cluster: Cluster) -> None:
        """Begin to make a plan, in place of one for other conditions that is being made."""
        if self.asked is not None and self.asked.conditions.distance(asked.conditions) < NEAR:
            return
        self.drop()
        self.asked = asked
        self.begin()
        if self._background is not None:
            self._background.ask((asked, cluster, self.variants.layouts()))

    def drop(self) -> None:
        """Leave the plan that is being made, and the process that makes it."""
        if self.asked is not None:
            self.end()
        self.asked = None

    def take(self) -> tuple[PlanRequest, MadePlan | HetuFxError]:
        """Return the plan that is ready, or what went wrong, on every rank; collective."""
        assert self.asked is not None, "facts say that a plan is ready which nobody has asked for"
        asked, self.asked = self.asked, None
        try:
            made = broadcast_from_rank0(self.table, self._result)
        except CommError:
            raise
        except HetuFxError as error:
            return asked, error
        self._note(made)
        return asked, made

    def make_now(self, asked: PlanRequest, cluster: Cluster) -> MadePlan:
        """Make a plan while all ranks wait; collective. Raises on every rank what went wrong."""
        self.drop()
        made = broadcast_from_rank0(self.table, lambda: self._made((asked, cluster, self.variants.layouts())))
        self._note(made)
        return made

    def _note(self, made: MadePlan) -> None:
        if made.tried is not None:
            self.tried.note(made.plan, made.tried)

    def _made(self, wanted: _Wanted) -> MadePlan:
        start, (asked, cluster, layouts) = perf_counter(), wanted
        devices = cluster.without(tuple(asked.conditions.drained)).with_rates(dict(asked.conditions.rates))
        plan = self.planner(devices, asked.name)
        seconds = perf_counter() - start
        return MadePlan(plan, seconds, self.variants.deduced(plan, layouts), self.tried.try_on_this_rank(plan))

    def _result(self) -> MadePlan:
        assert self._background is not None, "rank 0 makes plans"
        return self._background.result()


NEAR = 0.05
"""The plan for rates that differ by less than this is used for others at once: rates of few steps are no better."""

ALIKE = 0.01
"""Where rates differ by more than this, a plan of their own may still be faster."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The devices' straggling rates, of those that are not 1, and the devices that are drained."""

    rates: tuple[tuple[int, float], ...] = ()
    drained: frozenset[int] = frozenset()

    @classmethod
    def of(cls, rates: Mapping[int, float], drained: Collection[int] = ()) -> Conditions:
        """Return the conditions that some rates are, those of drained devices left out."""
        slow = ((rank, rate) for rank, rate in sorted(rates.items()) if rate != 1.0 and rank not in drained)
        return cls(tuple(slow), frozenset(drained))

    @property
    def name(self) -> str:
        """Return a name that is fit for a file: `slow-1x2.5` where device 1 takes 2.5 times as long.

        Devices that are left out stand first: `without-3-slow-1x2.5`.
        """
        left_out = ["without", *map(str, sorted(self.drained))] if self.drained else []
        slow = [f"{rank}x{rate:.3g}" for rank, rate in self.rates]
        return "-".join([*left_out, *(["slow", *slow] if slow else [])]) or "healthy"

    def distance(self, other: Conditions) -> float:
        """Return by how much the rates of one device differ at most; infinite if other devices are slow or drained."""
        mine, theirs = dict(self.rates), dict(other.rates)
        if mine.keys() != theirs.keys() or self.drained != other.drained:
            return float("inf")
        return max((max(rate / theirs[rank], theirs[rank] / rate) - 1 for rank, rate in mine.items()), default=0.0)


def nearest_known(plans: Iterable[Conditions], conditions: Conditions) -> Conditions | None:
    """Return which of the conditions that have a plan are these, as far as can be measured; None if none are."""
    near = min(plans, key=conditions.distance, default=None)
    return None if near is None or conditions.distance(near) >= NEAR else near


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
            with nullcontext() if quota is None else limit_cores(quota * _SHARE_OF_QUOTA):
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
def limit_cores(cores: float) -> Iterator[None]:
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
