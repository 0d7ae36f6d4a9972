"""Optimizer state that is still on its way to its new home while the next step computes; one owner of all of it.

A step's forward and backward read parameters and add to gradients; what optimizers keep is read at the step's end, and
with AdamW that is two thirds of the bytes. So a thread brings it, with groups of its own, and all who read wait for it:
a tensor that is on its way has no piece, and asking for the piece settles everything first. The thread works on
stand-ins, so that the tensors themselves change in the thread that reads them, and only there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import RLock
from time import perf_counter
from typing import Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hetu_fx.base.memory import Log
from hetu_fx.base.patches import Hook, install_patches, register_patch
from hetu_fx.base.per_rank import own
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.serial_threads import SerialExecutor, SerialTask
from hetu_fx.comm_ops.wire.shutdown import finish_at_exit
from hetu_fx.errors import CommError
from hetu_fx.switching.home.tensor import HomeTensor, give, wrap
from hetu_fx.switching.migrate.move_plan import SwitchPlan
from hetu_fx.switching.migrate.state_tensors import Key

_log = logging.getLogger("hetu_fx.home")

StandIns = Mapping[Key, HomeTensor]
Bring = Callable[[StandIns, GroupTable], None]
"""Brings stand-ins of tensors to their new homes; collective over the ranks of the table that it is given."""


@dataclass(frozen=True, slots=True)
class HomeEvent:
    """Homes have changed, or what was left for later has arrived, after so many training steps.

    Attributes:
        event: "moved" when training could go on; "arrived" when this rank first needed what travelled beside it.
        step: training steps so far.
        num_bytes: that travelled, of all ranks.
        seconds: on this rank: what training waited for, or how long it was on its way.
        waited_seconds: for how much of `seconds` this rank did nothing else.
        why: what they have changed for; empty where the user has asked for it.
    """

    event: Literal["moved", "arrived"]
    step: int
    num_bytes: int
    seconds: float
    waited_seconds: float
    why: str = ""


@dataclass(slots=True)
class _Journey:
    """State under way: the tensors with their stand-ins, the thread, when it began and ended."""

    plan: SwitchPlan
    pieces: Sequence[tuple[HomeTensor, HomeTensor]]
    turn: SerialTask
    times: list[float]


class InFlightState:
    """The state that is on its way; `settle` waits for it. All that reads optimizer state asks here.

    Args:
        table: the ranks. Messages have groups of their own beside it, as the steps go on.
        steps: tells the training steps so far, for the events.

    Attributes:
        events: what has happened last, and how often something has.
    """

    def __init__(self, table: GroupTable, steps: Callable[[], int] = lambda: 0) -> None:
        self.table, self._steps = table, steps
        self.events: Log[HomeEvent] = Log()
        self._journey: _Journey | None = None
        self._lock = RLock()  # a reader may be any thread
        finish_at_exit(self)

    def start(self, plan: SwitchPlan, tensors: StandIns, bring: Bring) -> None:
        """Bring `tensors` home in a thread, as `plan` says; what was on its way must be settled. Collective.

        `bring` gets stand-ins, and either changes one wholly or not at all. Optimizers' steps wait.
        """
        assert self._journey is None, "settle() comes first"
        beside = self.table.beside("state", is_whole=True)
        stand_ins = {key: _taken_away(tensor, self.settle) for key, tensor in tensors.items()}
        times = [perf_counter()]

        def work() -> None:
            try:
                with torch.no_grad(), using(beside):
                    bring(stand_ins, beside)
            finally:
                times.append(perf_counter())

        pieces = [(tensor, stand_ins[key]) for key, tensor in tensors.items()]
        self._journey = _Journey(plan, pieces, SerialExecutor().start(work), times)
        _under_way().append(self)
        install_patches("torch")

    def settle(self) -> None:
        """Wait until nothing is on its way; from any thread.

        Raises, once: StateError on every rank if some rank failed (its own error there), CommError where a peer is dead
        or late. What had arrived whole stays, the rest is where it was.
        """
        with self._lock:
            if self._journey is not None:
                self._finish(self._journey)

    def finish(self) -> None:
        """Wait as `settle` does, before the groups are left; an error has nobody left to be told."""
        try:
            self.settle()
        except Exception as error:
            _log.warning("rank %d: optimizer state did not arrive at its new home: %s", self.table.rank, error)
            error.__traceback__ = None  # what it holds would keep connections open

    def record_home_change(self, plan: SwitchPlan, seconds: float, why: str = "") -> None:
        """Record a change of home that training has waited for."""
        self.events.note(HomeEvent("moved", self._steps(), plan.now.total_bytes, seconds, seconds, why))

    def _finish(self, journey: _Journey) -> None:
        asked = perf_counter()
        self._wait(journey)
        error = journey.turn.error
        self._journey = None
        for tensor, stand_in in journey.pieces:
            give(tensor, stand_in.local, stand_in.home_layout)
        _under_way().remove(self)
        if error is not None:
            raise error
        start, end = journey.times
        waited, num_bytes = perf_counter() - asked, journey.plan.total_bytes
        self.events.note(HomeEvent("arrived", self._steps(), num_bytes, end - start, waited))

    def _wait(self, journey: _Journey) -> None:
        # Each wait in the thread is bounded by the groups' timeout: a bucket that takes longer has failed by then.
        bound = self.table.timeout.total_seconds() * (len(journey.plan.buckets) + 1)
        with self.table.waiting("optimizer state on its way"):
            if not journey.turn.is_over(bound):
                raise CommError(
                    f"rank {self.table.rank}: optimizer state of {journey.plan.total_bytes / 1e6:.4g} MB has not "
                    f"arrived at its new home in {bound:g} s; a peer is stuck"
                )


class _UnderWay(list["InFlightState"]):
    """The optimizer state of a rank that is on its way."""


_under_way = partial(own, _UnderWay)


def _settle_all(*_: object) -> None:
    for in_flight in tuple(_under_way()):
        in_flight.settle()


# On all optimizers: those that are known may be wrapped in one without hooks of its own (accelerate's are).
register_patch(
    Hook(
        "torch",
        "torch.optim.optimizer",
        "register_optimizer_step_pre_hook",
        why="optimizers would step without the state that is still on its way",
        tested="2.13",
        register=partial(register_optimizer_step_pre_hook, _settle_all),
    )
)


def _taken_away(tensor: HomeTensor, settle: Callable[[], None]) -> HomeTensor:
    """Leave a tensor without its piece until it is given back: reading it calls `settle`. Returns a stand-in."""
    stand_in = wrap(tensor.local, tensor.home_layout)
    tensor.wait_for_piece = settle
    del tensor.local, tensor.home_layout
    return stand_in
