"""A worker of `hetu-fx launch`: runs the script, and runs it again in the same process when another worker is lost.

What has been imported stays; process groups, the script's objects and its place in the world are made anew. The
script goes on from what `model.hetu.snapshots` keeps.
"""

from __future__ import annotations

import gc
import os
import queue
import runpy
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from hetu_fx.checkpoint import joining
from hetu_fx.comm_ops.wire.common_path import end_communication, leave_paths
from hetu_fx.comm_ops.wire.shutdown import leave_world, sever
from hetu_fx.comm_ops.wire.standings import oldest_wait
from hetu_fx.errors import CommError
from hetu_fx.launch.job import LaunchSpec, Message, MessageChannel
from hetu_fx.launch.launcher import JobLauncher

LOST_STATUS = 75  # EX_TEMPFAIL: the launcher is gone


@dataclass(slots=True)
class Order:
    """One run of the script: whether a worker has been lost in it, and whether it is over here."""

    message: Message
    lost: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def end_communication(self, why: str) -> None:
        """End this process's waits until the run is over here."""
        self.lost.set()
        end_communication(why, self.over)


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """How a run of the script ended: with the work done, left as a process joins, or stopped for a reason."""

    kind: Literal["done", "left", "stopped"]
    reason: str = ""
    status: int = 0  # of the process, if what stopped it is its own error


class Worker:
    """One process. The main thread runs the script, others listen to the launcher and give signs of life."""

    def __init__(self, channel: MessageChannel, spec: LaunchSpec) -> None:
        self.channel, self.spec = channel, spec
        self.script, *self.arguments = spec.command
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()

    def work(self) -> int:
        """Run the script as often as the launcher says; return the exit status."""
        for act in (self._listen, self._beat):
            threading.Thread(target=act, daemon=True).start()
        self.channel.send("ready")
        while (order := self._orders.get()) is not None:
            status = self._run(order)
            if status:
                return status
        return 0

    def _listen(self) -> None:
        order: Order | None = None
        for message in self.channel.messages():
            if message["kind"] == "lost" and order is not None:
                threading.Thread(target=order.end_communication, args=(message["reason"],), daemon=True).start()
            elif message["kind"] == "join":
                joining.asked.set()
            else:
                joining.asked.clear()
                order = Order(message) if message["kind"] == "start" else None
                self._orders.put(order)
        os._exit(LOST_STATUS)  # nobody would start this process again

    def _beat(self) -> None:
        while True:
            wait = oldest_wait()
            waits = {} if wait is None else {"waits_for": wait.what, "seconds": time.perf_counter() - wait.start}
            self.channel.send("beat", **waits)
            time.sleep(self.spec.beat_seconds)

    def _run(self, order: Order) -> int:
        """Run the script once; returns a status other than 0 for an error that is its own."""
        os.environ.update(order.message["environment"])
        sys.argv[:] = [self.script, *self.arguments]
        made = _outcome(self.script)
        may_be_alone = not made.reason.startswith(CommError.__name__)
        if made.status and may_be_alone and not order.lost.wait(self.spec.news_seconds):
            return made.status
        _clean_up(made.reason)
        if made.status:  # the launcher is to say who is lost, and not that this one has stopped
            order.lost.wait(self.spec.news_seconds)
        order.over.set()
        self.channel.send(made.kind, reason=made.reason)
        return 0


def _outcome(script: str) -> ScriptOutcome:
    """Run a script.

    Nothing of it is held afterwards: what an error's traceback holds would keep connections open.
    """
    try:
        runpy.run_path(script, run_name="__main__")
    except joining.Joining as joined:
        return ScriptOutcome("left", str(joined))
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        return ScriptOutcome("stopped", f"exit status {status}", status) if status else ScriptOutcome("done")
    except Exception as error:  # whatever it is, it may come of a worker that is lost
        told = "".join(traceback.format_exception(error))
        error.__traceback__ = None
        print(told, file=sys.stderr, end="", flush=True)
        return ScriptOutcome("stopped", f"{type(error).__name__}: {error}", 1)
    return ScriptOutcome("done")


def _clean_up(why: str) -> None:
    """Leave the world, which the others are told first, and free what the script has left."""
    leave_paths(why)
    sever()
    gc.collect()
    with suppress(RuntimeError):  # a group whose peers are gone already
        leave_world()


def run(spec: LaunchSpec) -> int:
    """Run a job to its end; return its exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import hetu_fx.api as _warm  # noqa: F401  (what workers would each import)

    gc.collect()
    gc.freeze()  # what is imported stays: going through it takes a second each time
    return JobLauncher(spec, work).run()


def work(spec: LaunchSpec, channel: MessageChannel) -> int:
    """Be one worker of a job; return its exit status."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(spec.command[0])))
    return Worker(channel, spec).work()
