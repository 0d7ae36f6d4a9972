"""State on its way in one process: who waits for it, what an error leaves, and that nothing is read too early."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.wire import shutdown
from hetu_fx.comm_ops.wire.groups import GroupTable, active
from hetu_fx.errors import CommError, StateError
from hetu_fx.switching.home.ops import HomeTensor, home_layout
from hetu_fx.switching.migrate.in_flight import InFlightState
from hetu_fx.switching.migrate.move_plan import SwitchPlan

KEY = ("weight", "optimizer 0 exp_avg")
NOTHING = SwitchPlan((), (0,))


class Alone(GroupTable):
    """A world of one that pretends to have groups for a thread."""

    def beside(self, name: str, *, is_whole: bool = False) -> GroupTable:
        table = GroupTable()
        table.pauses_work = False
        return table


class Trip:
    """A parameter with AdamW's state of which one tensor is on its way, until `arrive` is called."""

    def __init__(self, error: Exception | None = None, seconds: float = 60.0) -> None:
        layout = home_layout(Annotation.on((0,)), (4,), 0, 1)
        self.home = nn.Parameter(HomeTensor.from_full(torch.ones(4), layout))
        self.home.grad = torch.ones_like(self.home)
        self.optimizer = torch.optim.AdamW([self.home])
        self.optimizer.step()
        self.tensor: Any = self.optimizer.state[self.home]["exp_avg"]
        self.way = InFlightState(Alone(timeout=timedelta(seconds=seconds)), lambda: 7)
        self._may_arrive, self._error = threading.Event(), error
        self.way.start(NOTHING, {KEY: self.tensor}, self._bring)

    def _bring(self, stand_ins: Any, table: GroupTable) -> None:
        assert self._may_arrive.wait(60)
        assert active() is table
        assert not torch.is_grad_enabled()
        stand_ins[KEY].data = torch.full((4,), 5.0)
        if self._error is not None:
            raise self._error

    def arrive(self) -> None:
        self._may_arrive.set()


@pytest.fixture
def trip() -> Iterator[Trip]:
    made = Trip()
    yield made
    made.arrive()
    made.way.finish()


READERS: dict[str, Callable[[Trip], Any]] = {
    "its piece": lambda trip: trip.tensor.local,
    "its layout": lambda trip: trip.tensor.home_layout,
    "an op": lambda trip: trip.tensor + 1,
    "a copy": lambda trip: copy.deepcopy(trip.tensor),
    "the optimizer's step": lambda trip: trip.optimizer.step(),
    "loading its own state": lambda trip: trip.optimizer.load_state_dict(copy.deepcopy(trip.optimizer.state_dict())),
    "whoever asks for all": lambda trip: trip.way.settle(),
}


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_the_state_waits_for_it(trip: Trip, reader: str) -> None:
    threading.Timer(0.05, trip.arrive).start()
    READERS[reader](trip)
    assert trip.way._journey is None
    assert [(event.event, event.step) for event in trip.way.events] == [("arrived", 7)]


def test_printing_does_not_wait(trip: Trip) -> None:
    assert "whose shard is not here yet" in repr(trip.tensor)
    assert trip.way._journey is not None


def test_hooks_of_others_run_after_a_step_has_waited(trip: Trip) -> None:
    found: list[Tensor] = []
    hook = register_optimizer_step_pre_hook(lambda *_: found.append(trip.tensor.local.clone()))
    trip.arrive()
    for _ in range(2):
        trip.optimizer.step()
    hook.remove()
    assert torch.equal(found[0], torch.full((4,), 5.0))
    assert len(found) == 2


def test_what_needs_no_value_does_not_wait(trip: Trip) -> None:
    assert (tuple(trip.tensor.shape), trip.tensor.dtype, trip.tensor.dim()) == ((4,), torch.float32, 1)
    trip.optimizer.state_dict()
    trip.optimizer.zero_grad()
    assert float(trip.home.detach().sum()) < 4.0
    assert trip.way._journey is not None
    assert active().pauses_work, "the thread's table is its own"


def test_the_tensor_stays_the_same_object_with_the_new_value_and_its_version_tells(trip: Trip) -> None:
    version = trip.tensor._version
    trip.arrive()
    trip.way.settle()
    assert torch.equal(trip.tensor.local, torch.full((4,), 5.0))
    assert trip.optimizer.state[trip.home]["exp_avg"] is trip.tensor
    assert trip.tensor._version > version
    with pytest.raises(AttributeError, match="'HomeTensor' object has no attribute 'nonsense'"):
        _ = trip.tensor.nonsense


@pytest.mark.parametrize("error", [StateError("no memory"), CommError("a peer is dead"), MemoryError()])
def test_an_error_comes_out_once_before_the_optimizer_has_done_anything(error: Exception) -> None:
    trip = Trip(error)
    trip.arrive()
    before, count = trip.home.detach().clone(), float(trip.optimizer.state[trip.home]["step"])
    with pytest.raises(type(error)):
        trip.optimizer.step()
    assert torch.equal(trip.home.detach().local, before.local)  # type: ignore[attr-defined]
    assert float(trip.optimizer.state[trip.home]["step"]) == count
    assert torch.equal(trip.tensor.local, torch.full((4,), 5.0)), "what had arrived stays"
    assert trip.way.events.count == 0
    trip.optimizer.step()
    assert float(trip.optimizer.state[trip.home]["step"]) == count + 1


def test_waiting_is_bounded_and_what_does_not_arrive_is_never_read() -> None:
    trip = Trip(seconds=0.01)
    for act in (trip.way.settle, trip.optimizer.step, lambda: trip.tensor + 1):
        with pytest.raises(CommError, match=r"has not arrived at its new home in 0\.01 s; a peer is stuck"):
            act()
    trip.arrive()
    trip.way.finish()


def test_what_fails_when_the_process_leaves_is_told_and_raised_no_more(caplog: pytest.LogCaptureFixture) -> None:
    trip = Trip(StateError("no memory"))
    trip.arrive()
    trip.way.finish()
    assert "did not arrive at its new home: no memory" in caplog.text
    trip.way.settle()


def test_threads_finish_before_the_groups_that_they_use_are_let_go(trip: Trip, monkeypatch: pytest.MonkeyPatch) -> None:
    held_at_release: list[bool] = []

    class Holder:
        def release(self) -> None:
            held_at_release.append(trip.way._journey is None)

    monkeypatch.setattr(shutdown.communication, "holders", [Holder()])
    monkeypatch.setattr(shutdown.communication, "users", [trip.way])
    threading.Timer(0.05, trip.arrive).start()
    shutdown.leave_world()
    assert held_at_release == [True]


def test_several_readers_in_several_threads_get_the_same(trip: Trip) -> None:
    found: list[Tensor] = []
    readers = [threading.Thread(target=lambda: found.append(trip.tensor.local)) for _ in range(4)]
    for reader in readers:
        reader.start()
    trip.arrive()
    for reader in readers:
        reader.join(60)
    assert len(found) == 4
    assert all(piece is trip.tensor.local for piece in found)
