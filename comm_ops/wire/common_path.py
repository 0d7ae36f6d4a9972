"""All ranks take one path: who waits for a rank that does not come gets an error that says where everybody is.

A thread of every process tells the store where its process stands, and, while that waits, reads where the others do.
Once it has waited too long for one that is elsewhere, it leaves the verdict in the store and cuts the connections of
its groups (gloo cannot be aborted), so that every wait of every rank ends; what comes out of the wait is the verdict.

Where the store does not answer, the process is cut off from the job. It says so, and dials on. If it waits for others
all the while, its waits end in the end, and so does the process: its launcher may start it again.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hetu_fx.base.torch_private import PrefixStore, Store, connected_anew, is_group_member, store_address
from hetu_fx.comm_ops.wire.calls import last, user_line_of_error, whereabouts
from hetu_fx.comm_ops.wire.shutdown import communication, finish_at_exit, sever
from hetu_fx.comm_ops.wire.standings import RankStatus, Reach, Standings, StoreSilence, Wait, oldest_wait
from hetu_fx.errors import CommError, DivergedError, EnvironmentProblem

WAIT_SECONDS = 60.0
VARIABLE = "HETU_FX_WAIT_SECONDS"

_LONGEST_PAUSE = 2.0
_SHORTEST_PAUSE = 0.05
_POLL_SECONDS = 0.002
_BEATS = 3  # without which a rank is dead, once its connection is
_NEWS_SECONDS = 0.2  # in which all ranks of a message have told where they are
_STORE_SECONDS = 0.25  # between looks at whether the store answers
_EXIT_SECONDS = 30.0  # for a script to end by itself once it is cut off
_CUT_SECONDS = 0.01  # between cuts of connections: some may just be being opened
_VERDICT = "verdict"  # each start has a part of the store that nobody has written to

_log = logging.getLogger("hetu_fx.waits")


def patience(asked: float | None) -> float:
    """Return the seconds that ranks wait for one that is elsewhere: as asked, else as the environment says, else 60.

    Raises:
        EnvironmentProblem: it is no number above 0.
    """
    told = os.environ.get(VARIABLE)
    try:
        seconds = asked if asked is not None else WAIT_SECONDS if told is None else float(told)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        name = VARIABLE if asked is None else "wait_seconds"
        value = repr(told) if asked is None else asked
        raise EnvironmentProblem(f"{name} is {value}; give seconds above 0, or 'inf' to wait as long as groups do")
    return seconds


class CommonPath:
    """Watches that the ranks of a world take one path.

    Args:
        base: the group of all ranks as the user has it; the watch ends with it.
        store: where they meet; nobody else waits in it by this connection.
        seconds: for which it waits for one that is elsewhere.

    Attributes:
        broken: the verdict, once a rank has left the path: nothing can be communicated any more.
        group: all ranks, by connections that can be cut; None before it is made.
    """

    def __init__(self, base: ProcessGroup, store: Store, seconds: float) -> None:
        self._base, self._store, self.seconds = weakref.ref(base), store, seconds
        self.rank = dist.get_rank(base)
        self._others = [other for other in range(dist.get_world_size(base)) if other != self.rank]
        self.broken: str | None = None
        self.group: ProcessGroup | None = None
        self._process, self._beat, self._known = os.getpid(), 0, Standings()
        self._inside_until = perf_counter()
        self._warned: Wait | None = None
        self._over, self._cut, self._cut_why = threading.Event(), threading.Event(), ""
        self._left: str | None = None  # why this rank leaves, which its thread tells the others
        self._is_asked, self._is_refused, self._silence = False, False, StoreSilence()
        self._tell(self._standing())
        self._thread = threading.Thread(target=self._work, daemon=True, name="hetu_fx_common_path")
        self._thread.start()
        threading.Thread(target=self._watch_store, daemon=True, name="hetu_fx_store").start()
        finish_at_exit(self)

    @property
    def _pause(self) -> float:
        return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, self.seconds / 20))

    # In the threads that communicate.

    def check(self) -> None:
        """Raise DivergedError if a rank has left the path, CommError if communication has been ended."""
        if self.broken is not None:
            raise DivergedError(self.broken)
        if self._cut.is_set():
            raise CommError(f"rank {self.rank}: communication has been ended: {self._cut_why}")

    def meet(self, name: str, members: Sequence[int]) -> None:
        """Wait until all `members`, ranks of the group, have come to the meeting of that name, which there is once."""
        self._store.set(f"met/{name}/{self.rank}", "here")
        absent = [f"met/{name}/{member}" for member in members]
        while absent:
            self.check()
            absent = [key for key in absent if not self._store.check([key])]
            time.sleep(_POLL_SECONDS if absent else 0)

    def has_left(self, rank: int) -> bool:
        """Tell whether another rank has come to the end of its program, without an error."""
        try:
            standing = self._read(rank)
        except RuntimeError:  # the store is gone, with the rank that served it
            return False
        return standing is not None and standing.left == ""

    def explain(self, what: str) -> None:
        """Raise DivergedError if waiting for `what` has failed because a rank has left, or is dead.

        CommError if communication has been ended from here.
        """
        self.check()
        asking = threading.Thread(target=self._ask, args=(what,), daemon=True)
        asking.start()
        self._join(asking)
        self.check()

    def _join(self, thread: threading.Thread) -> None:
        """Wait for a thread that asks the store, until communication is ended: one that is cut off does not answer."""
        while thread.is_alive() and not self._cut.is_set():
            thread.join(_CUT_SECONDS)

    def _ask(self, what: str) -> None:
        wait = Wait(what, perf_counter(), self)  # the store may be cut off, as the others may
        try:
            self._hear_verdict()
            if self.broken is None:
                self._name_lost(replace(self._standing(), waits_for=what, seconds=0.0))
        except (CommError, RuntimeError) as error:  # or the store is gone, with the rank that served it
            _log.info("rank %d asks no longer where the others are: %s", self.rank, error)
        finally:
            wait.end()

    def _name_lost(self, own: RankStatus) -> None:
        """Leave a verdict on the ranks that have left, or give no sign of life while this one looks."""
        known, seconds = Standings(), _BEATS * self._pause
        known.hear(self._told(), 0.0)
        lost = known.astray(own, math.inf)
        if not lost:
            self._cut.wait(seconds)
            self.check()
            known.hear(self._told(), seconds)
            lost = known.astray(own, math.inf) or known.silent_ranks(seconds)
        if lost and self.broken is None:
            self._break(known.verdict(self.rank, own, lost, 2 * seconds))

    def _told(self) -> dict[int, RankStatus | None]:
        return {other: self._read(other) for other in self._others}

    def refuse_unlike(self, what: str) -> None:
        """Raise DivergedError: other ranks have come to a message of this rank's for something else."""
        own = replace(self._standing(), waits_for=what, seconds=0.0)
        try:
            self._tell(own)
            time.sleep(_NEWS_SECONDS)
            self._known.hear(self._told(), 0.0)
            self._break(self._known.explain_ranks("ranks make unlike calls", self.rank, own, math.inf))
        except RuntimeError:  # the store is gone, with the rank that served it
            _log.info("rank %d cannot ask where the others are: the store is gone", self.rank)
        self.check()

    def finish(self) -> None:
        """Watch no more; the others do not wait for this rank."""
        self.leave("")
        self._forget()

    def _forget(self) -> None:
        self.group = None
        for base in [base for base, path in tuple(communication.paths.items()) if path is self]:
            communication.paths.pop(base, None)

    def cut(self, why: str) -> None:
        """End this rank's waits, from any thread: those that look at memory look here, too."""
        self._cut_why = self._cut_why or why
        self._cut.set()

    def leave(self, why: str) -> None:
        """Tell the others that this process takes part no longer."""
        if self._over.is_set() or self._process != os.getpid():
            return
        if self._is_refused or self._silence.is_said or self._cut.is_set():  # there is nobody to tell, or nothing new
            self._over.set()
            return
        self._left = why
        self._over.set()
        self._join(self._thread)
        if not self._thread.is_alive():  # it may have ended with its group, before this rank left
            self._tell_left()

    def _tell_left(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            with suppress(RuntimeError):  # the store is gone: the others know
                self._tell(self._standing(left=left))

    # In the thread that watches.

    def _work(self) -> None:
        before = perf_counter()
        while not self._over.wait(self._pause):
            now = perf_counter()
            base = self._base()
            if base is None or not is_group_member(base):
                self._forget()
                return
            self._is_asked = True
            try:
                self._tell(self._standing())
                self._look(now, min(now - before, 2 * self._pause))
            except RuntimeError as error:
                _log.info("rank %d: the store is gone, nobody is watched: %s", self.rank, error)
                self._is_refused = True
                self._dial()
                continue
            self._is_asked = self._is_refused = False
            before = now
        self._tell_left()

    def _dial(self) -> None:
        """Connect to the store anew, if this rank waits for others, and the store is there and the same."""
        if oldest_wait(self) is None:  # who has served it may just have come to the end
            return
        try:
            found = connected_anew(self._store)
            if found.check([f"at/{self.rank}"]):
                self._store = found
        except RuntimeError as error:
            _log.info("rank %d still cannot reach the store: %s", self.rank, error)

    # In the thread that watches the store, as the other one may wait for it.

    def _watch_store(self) -> None:
        before = perf_counter()
        while not self._over.wait(_STORE_SECONDS):
            # Of a time in which this process itself was stopped, it has heard nothing.
            now = perf_counter()
            passed, before = min(now - before, 2 * _STORE_SECONDS), now
            is_waiting = oldest_wait(self) is not None
            is_needed = is_waiting or not self._is_refused  # as above
            news = self._silence.hear(self._is_asked, passed, self.seconds, is_needed=is_needed, is_waiting=is_waiting)
            if news is not Reach.SAME:
                self._report(news)
            if news is Reach.OVER:
                self._end_cut_off()
                return

    def _report(self, news: Reach) -> None:
        here = f"rank {self.rank} on {socket.gethostname()}"
        match news:
            case Reach.LOST:
                _log.warning(
                    "%s cannot reach the job's store at %s: it has not answered for %.1f s; is the network cut, or the "
                    "machine of the store gone? What snapshots have kept stays. If it is not reached within %g s, and "
                    "this rank waits for others, its waits end, and so does the process",
                    here, store_address(self._store), self._silence.seconds, self.seconds,
                )  # fmt: skip
            case Reach.BACK:
                _log.warning("%s has reached the job's store again", here)
            case _:
                _log.error("%s has not reached the job's store for %.1f s", here, self._silence.seconds)

    def _end_cut_off(self) -> None:
        """End the waits of this rank, and the process, unless `hetu-fx launch` runs the script in it once more."""
        why = f"the job's store at {store_address(self._store)} has not answered for {self._silence.seconds:.1f} s"
        threading.Thread(target=end_communication, args=(why, self._over), daemon=True).start()
        if "HETU_FX_START" not in os.environ:
            threading.Thread(target=_exit_cut_off).start()  # no daemon: the interpreter waits for it

    def _standing(self, left: str | None = None) -> RankStatus:
        self._beat += 1
        now, where, wait = perf_counter(), whereabouts(), oldest_wait(self)
        if where.call:
            self._inside_until = now
        since = max(self._inside_until, last.at) if wait is None else wait.start
        waits_for, table = ("", "") if wait is None else (wait.what, wait.table)
        return RankStatus(
            self._beat, where.call, where.place, waits_for, now - since, last.text, last.steps, left, table
        )

    def _tell(self, standing: RankStatus) -> None:
        self._store.set(f"at/{self.rank}", standing.write())

    def _hear_verdict(self) -> None:
        if self.broken is None and self._store.check([_VERDICT]):
            self.broken = self._store.get(_VERDICT).decode()

    def _look(self, now: float, passed: float) -> None:
        """Take in a verdict; while this rank waits, see whether it does so in vain."""
        self._hear_verdict()
        if self.broken is not None:
            sever()  # again and again: connections may just be being opened
            return
        wait = oldest_wait(self)
        if wait is None or now - wait.start < self.seconds / 4:
            self._known = Standings()
            return
        self._known.hear(self._told(), passed)
        self._judge(wait, self._standing())

    def _read(self, rank: int) -> RankStatus | None:
        key = f"at/{rank}"
        return RankStatus.read(self._store.get(key).decode()) if self._store.check([key]) else None

    def _judge(self, wait: Wait, own: RankStatus) -> None:
        if not own.waits_for:
            return
        if astray := self._known.astray(own, self.seconds):
            self._break(self._known.verdict(self.rank, own, astray, self.seconds))
        elif self._warned is not wait and (late := self._known.astray(own, self.seconds / 2)):
            self._warned = wait
            told = self._known.verdict(self.rank, own, late, self.seconds / 2)
            _log.warning("after %g s all processes end with an error: %s", self.seconds, told)

    def _break(self, text: str) -> None:
        self._store.compare_set(_VERDICT, "", text)
        self.broken = self._store.get(_VERDICT).decode()
        sever()


def common_path_of(group: ProcessGroup | None) -> CommonPath | None:
    """Return what watches the ranks of a group; None if nobody does."""
    return None if group is None else communication.paths.get(group)


def watch_path(group: ProcessGroup, store: Callable[[], Store], seconds: float) -> CommonPath | None:
    """Watch the ranks of a group from now on, and wait so many seconds for each; None if that is for ever."""
    path = communication.paths.get(group)
    if path is not None:
        path.seconds = seconds
    elif math.isfinite(seconds) and dist.get_world_size(group) > 1:
        path = communication.paths[group] = CommonPath(
            group, PrefixStore(f"hetu_fx/path/{group.group_name}", store()), seconds
        )
    return path


def join_path(path: CommonPath, group: ProcessGroup) -> ProcessGroup:
    """Let a group of the same ranks be watched too, the one whose connections can be cut."""
    path.group, communication.paths[group] = group, path
    return group


def end_communication(why: str, until: threading.Event) -> None:
    """End all communication of this process until an event is set: it may be opening connections."""
    while not until.is_set():
        for path in tuple(communication.paths.values()):
            path.cut(why)
        sever()
        until.wait(_CUT_SECONDS)


def _exit_cut_off() -> None:
    """End this process once its script has ended, or after a while, with the status of what may be tried again."""
    threading.main_thread().join(_EXIT_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(os.EX_TEMPFAIL)


def leave_paths(why: str) -> None:
    """Tell the others that this process takes part no longer, and why, before its connections end."""
    for path in tuple(communication.paths.values()):
        path.leave(why)


@atexit.register
def _tell_end() -> None:
    error = getattr(sys, "last_value", None)
    place = user_line_of_error(error)
    leave_paths("" if error is None else f"{type(error).__name__}: {error}{place and f', at {place}'}")
