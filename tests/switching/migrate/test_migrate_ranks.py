"""Training state on three gloo ranks goes to other homes: same objects, same values, and training goes on as before."""

from __future__ import annotations

import copy
import itertools
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.comm_ops.wire import bsr_run, p2p
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.peers import system
from hetu_fx.errors import CommError, StateError
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.migrate import byte_runs
from hetu_fx.switching.migrate import migrate as migrate_module
from hetu_fx.switching.migrate.buckets import Carrier
from hetu_fx.switching.migrate.in_flight import InFlightState
from hetu_fx.switching.migrate.migrate import migrate
from tests.switching.home.test_ops_ranks import HOMES, OPTIMIZERS, WORLD, parameters, set_gradients

ELSEWHERE: dict[str, Annotation] = {
    "uneven": Annotation.on((1, 2), Split(1, (5, 1))),
    "columns": Annotation.on((0, 1), Duplicate(2)),
    "alone": Annotation.on((0, 2), Split(0, (1, 3))),
    "copies": Annotation.on((1,)),
    "mixed": Annotation.on((2, 1, 0), Split(0, (1, 1, 1))),
    "scalar": Annotation.on((0,)),
}
SMALL: dict[str, Any] = {"extra_share": 1e-3, "least_extra_bytes": 0}
BEFORE = {name: annotation for name, (_, annotation) in HOMES.items()}


def named(homes: list[Any]) -> dict[str, Any]:
    return dict(zip(HOMES, homes, strict=True))


def moved(homes: list[Any], optimizers: list[Any], targets: dict[str, Annotation], **options: Any) -> Any:
    return migrate(named(homes), targets, optimizers, GroupTable(), **options)


def assert_same(homes: list[Any], plains: list[Any]) -> None:
    for name, home, plain in zip(HOMES, homes, plains, strict=True):
        found = home.detach().full_tensor()
        assert torch.equal(found, plain.detach()), f"{name}: {found} is not {plain}"


def state_objects(optimizer: Any) -> list[int]:
    return [id(value) for state in optimizer.state.values() for value in state.values()]


def check_every_optimizer_goes_on_as_if_nothing_had_moved(rank: int, world: int, folder: Path) -> None:
    for name, (kind, options) in OPTIMIZERS.items():
        plains, homes = parameters(rank)
        optimizers = [kind(group, **copy.deepcopy(options)) for group in (plains, homes)]
        identities = [id(home) for home in homes]
        for step, targets in enumerate((ELSEWHERE, {}, BEFORE, ELSEWHERE)):
            set_gradients(plains, homes, step)
            for optimizer in optimizers:
                optimizer.step()
            objects = state_objects(optimizers[1])
            plan = moved(homes, optimizers[1:], targets)
            assert plan.total_bytes == plan.least_bytes, name
            assert state_objects(optimizers[1]) == objects, name
            for home, target in zip(homes, targets.values(), strict=False):
                state = [v for v in optimizers[1].state[home].values() if isinstance(v, HomeTensor)]
                assert {t.home_layout for t in (home, home.grad, *state)} == {home.home_layout}, name
                assert home.home_layout.annotation == target, name
                assert home.local.shape == home.home_layout.local_shape, name
        assert [id(home) for home in optimizers[1].param_groups[0]["params"]] == identities, name
        for home, plain in zip(homes, plains, strict=True):
            torch.testing.assert_close(home.detach().full_tensor(), plain.detach(), rtol=1e-12, atol=1e-12, msg=name)


def check_gradients_that_add_up_move_too(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    gradients = [home.grad for home in homes]
    moved(homes, [], ELSEWHERE)
    assert all(home.grad is gradient for home, gradient in zip(homes, gradients, strict=True))
    assert_same([home.grad for home in homes], [plain.grad for plain in plains])


def check_values_stay_bit_by_bit_however_small_the_buckets(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    small = moved(homes, [], ELSEWHERE, extra_share=1e-3, least_extra_bytes=0)
    assert_same(homes, plains)
    assert moved(homes, [], ELSEWHERE).buckets == ()
    large = moved(homes, [], BEFORE, extra_share=10.0)
    assert len(small.buckets) > 8
    assert not all(bucket.completes for bucket in small.buckets)
    assert len(large.buckets) == 1
    assert_same(homes, plains)


def check_what_ranks_of_one_machine_share_is_not_sent(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    for targets, transport in ((ELSEWHERE, Carrier.DIRECT), (BEFORE, Carrier.SHARED)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(p2p, "post", lambda *arguments: pytest.fail("a message was sent"))
            forbid_reading(patch, transport is Carrier.SHARED and rank == 1)
            plan = moved(homes, [], targets, extra_share=1e-3, least_extra_bytes=0)
        assert plan.transport is transport
        assert_same(homes, plains)


def forbid_reading(patch: pytest.MonkeyPatch, is_forbidden: bool) -> None:
    """Let the system refuse to read other processes' memory."""

    def refused(*arguments: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    if is_forbidden:
        patch.setattr(system, "_read_once", refused)


def has_no_room(patch: pytest.MonkeyPatch) -> None:
    """Let there be no memory to pack in for others."""
    patch.setattr(migrate_module, "shared_memory", lambda *arguments, **options: None)


def check_all_slices_may_be_read_where_they_are(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    optimizer = torch.optim.SGD(homes, momentum=0.9)
    for home, plain in zip(homes, plains, strict=True):
        optimizer.state[home]["momentum_buffer"] = HomeTensor.from_full(plain.detach(), home.home_layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_runs, "LEAST_RUN_BYTES", 0)
        patch.setattr(migrate_module, "share", lambda *arguments: pytest.fail("there is nothing to pack"))
        for targets in (ELSEWHERE, BEFORE):
            plan = moved(homes, [optimizer], targets, extra_share=2e-3, least_extra_bytes=0)
            assert_same(homes, plains)
            assert_same([home.grad for home in homes], [plain.grad for plain in plains])
            assert_same([optimizer.state[home]["momentum_buffer"] for home in homes], plains)
    assert (plan.transport, len(plan.buckets) > 1) == (Carrier.DIRECT, True)


def check_parts_that_are_not_dense_are_packed(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    columns = named(homes)["columns"]
    if rank == 1:
        columns.local = columns.local.t().contiguous().t()
        assert not columns.local.is_contiguous()
    assert moved(homes, [], ELSEWHERE).transport is Carrier.SHARED
    assert_same(homes, plains)


def check_a_rank_that_cannot_read_any_more_fails_on_all_and_changes_nothing(
    rank: int, world: int, folder: Path
) -> None:
    plains, homes = parameters(rank)
    table = GroupTable()
    assert migrate_module.all_reach(table, []) is not None
    with pytest.MonkeyPatch.context() as patch:
        forbid_reading(patch, rank == 2)
        with pytest.raises(StateError, match="could not be read from process"):
            migrate(named(homes), ELSEWHERE, [], table)
    assert {name: home.home_layout.annotation for name, home in named(homes).items()} == BEFORE
    assert_same(homes, plains)


def check_messages_are_sent_where_memory_is_not_shared(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    for targets, apart in ((ELSEWHERE, (1,)), (BEFORE, (0, 1, 2)), (ELSEWHERE, ())):
        with pytest.MonkeyPatch.context() as patch:
            forbid_reading(patch, is_forbidden=True)
            if rank in apart:  # it has no room to share, and sees nobody else's
                has_no_room(patch)
                patch.setattr(migrate_module, "map_remote_memory", lambda *arguments, **options: None)
            plan = moved(homes, [], targets, extra_share=1e-3, least_extra_bytes=0)
        assert plan.transport is (Carrier.SENT if apart else Carrier.SHARED)
        assert_same(homes, plains)


def check_messages_are_sent_from_a_rank_that_has_no_room_to_share_any_more(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    for targets, transport in ((ELSEWHERE, Carrier.DIRECT), (BEFORE, Carrier.SHARED)):
        table = GroupTable()
        assert migrate_module.all_share(table, is_able=True)
        with pytest.MonkeyPatch.context() as patch:
            forbid_reading(patch, transport is Carrier.SHARED)
            if rank == 1:
                has_no_room(patch)
            plan = migrate(named(homes), targets, [], table, extra_share=1e-3, least_extra_bytes=0)
        assert plan.transport is transport
        assert_same(homes, plains)


def check_a_rank_that_fails_between_buckets_fails_on_all_and_no_tensor_is_half_moved(
    rank: int, world: int, folder: Path
) -> None:
    plains, homes = parameters(rank)
    small: dict[str, Any] = {"extra_share": 1e-3, "least_extra_bytes": 0}
    last = len(moved(homes, [], ELSEWHERE, **small).buckets) - 1
    moved(homes, [], BEFORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate_module, "unpack", failing_at(last, rank == 1))
        with pytest.raises((MemoryError, StateError), match="no memory is left"):
            moved(homes, [], ELSEWHERE, **small)
    found = [tensor.home_layout.annotation for home in homes for tensor in (home, home.grad)]
    old, new = ([places[name] for name in HOMES for _ in range(2)] for places in (BEFORE, ELSEWHERE))
    assert all(place in places for place, *places in zip(found, old, new, strict=True))
    assert found != old
    assert found != new
    assert all_gather_object(GroupTable(), found) == [found] * world
    assert_same(homes, plains)
    assert_same([home.grad for home in homes], [plain.grad for plain in plains])
    moved(homes, [], BEFORE)
    assert_same(homes, plains)


def overlapped(homes: list[Any], optimizer: Any, targets: dict[str, Annotation], transport: InFlightState) -> Any:
    transport.settle()
    return migrate(named(homes), targets, [optimizer], transport.table, later=transport, overlap=True, **SMALL)


def state_of(homes: list[Any], optimizer: Any) -> list[Tensor]:
    return [value for home in homes for value in (home.detach(), *optimizer.state[home].values())]


def check_state_that_arrives_beside_a_step_is_that_of_one_that_came_before(rank: int, world: int, folder: Path) -> None:
    transport = InFlightState(GroupTable())
    for name in ("adamw", "adamw_fused", "adamw_amsgrad", "sgd", "nadam_foreach", "asgd"):
        kind, options = OPTIMIZERS[name]
        sets = [parameters(rank)[1], parameters(rank)[1]]
        optimizers = [kind(homes, **copy.deepcopy(options)) for homes in sets]
        for step, targets in enumerate((ELSEWHERE, BEFORE, {}, ELSEWHERE)):
            plan = overlapped(sets[0], optimizers[0], targets, transport)
            moved(sets[1], optimizers[1:], targets)
            assert (transport._journey is None) == (not plan.later.buckets), name
            assert (transport._journey is None) == (step in (0, 2)), name
            for homes, optimizer in zip(sets, optimizers, strict=True):
                set_gradients(parameters(rank)[0], homes, step)
                optimizer.step()
        overlapped(sets[0], optimizers[0], BEFORE, transport)
        overlapped(sets[0], optimizers[0], ELSEWHERE, transport)  # the second right after the first
        overlapped(sets[0], optimizers[0], BEFORE, transport)
        moved(sets[1], optimizers[1:], BEFORE)
        for found, expected in zip(*map(state_of, sets, optimizers), strict=True):
            assert type(found) is type(expected), name
            if isinstance(found, HomeTensor):
                assert found.home_layout is expected.home_layout, name
                assert torch.equal(found.local, expected.local), name
            else:
                assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), name


def check_an_error_beside_a_step_reaches_all_ranks_before_optimizers_do_anything(
    rank: int, world: int, folder: Path
) -> None:
    _, homes = parameters(rank)
    optimizer, transport = torch.optim.AdamW(homes), InFlightState(GroupTable())
    optimizer.step()
    wholes = [tensor.clone() for tensor in state_of(homes, optimizer)]
    plan = overlapped(homes, optimizer, ELSEWHERE, transport)
    numbers = [len(plan.now.buckets), len(plan.buckets) - 1]
    overlapped(homes, optimizer, BEFORE, transport)
    transport.settle()
    for number in numbers:  # the first bucket beside the step, and the last
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(migrate_module, "unpack", failing_at(number, rank == 1))
            overlapped(homes, optimizer, ELSEWHERE, transport)
            with pytest.raises((MemoryError, StateError), match="no memory is left"):
                optimizer.step()
        assert transport._journey is None
        assert [home.home_layout.annotation for home in homes] == list(ELSEWHERE.values())
        tensors = [t for t in state_of(homes, optimizer) if isinstance(t, HomeTensor)]
        found = [tensor.home_layout.annotation for tensor in tensors]
        assert all_gather_object(GroupTable(), found) == [found] * world
        for tensor, whole in zip(state_of(homes, optimizer), wholes, strict=True):
            assert torch.equal(whole_of(tensor), whole_of(whole))
        overlapped(homes, optimizer, BEFORE, transport)
    transport.settle()
    assert {t.home_layout for t in state_of(homes[:1], optimizer) if isinstance(t, HomeTensor)} == {
        homes[0].home_layout
    }


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, HomeTensor) else tensor


def check_a_rank_that_is_stuck_beside_a_step_is_an_error_on_all_and_nothing_hangs(
    rank: int, world: int, folder: Path
) -> None:
    _, homes = parameters(rank)
    optimizer, transport = torch.optim.AdamW(homes), InFlightState(GroupTable(timeout=timedelta(seconds=1)))
    optimizer.step()
    others_gave_up, unpack = threading.Event(), bsr_run.unpack

    def stuck(*arguments: Any) -> Any:
        if rank == 1 and threading.current_thread() is not threading.main_thread():
            assert others_gave_up.wait(30)
        return unpack(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate_module, "unpack", stuck)
        overlapped(homes, optimizer, ELSEWHERE, transport)
        if rank == 1:
            all_gather_object(GroupTable(), None)
            others_gave_up.set()
        with pytest.raises(CommError):
            optimizer.step()
        if rank != 1:
            all_gather_object(GroupTable(), None)
    assert all(float(optimizer.state[home]["step"]) == 1 for home in homes)


def check_state_comes_beside_the_step_where_all_want_that_or_where_messages_are_sent(
    rank: int, world: int, folder: Path
) -> None:
    _, homes = parameters(rank)
    optimizer, transport = torch.optim.AdamW(homes), InFlightState(GroupTable())
    optimizer.step()
    for targets, overlap in ((ELSEWHERE, bool(rank)), (BEFORE, None)):  # None: all of them share memory
        plan = migrate(named(homes), targets, [optimizer], transport.table, later=transport, overlap=overlap)
        assert (transport._journey, plan.later.buckets) == (None, ())
    with pytest.MonkeyPatch.context() as patch:
        has_no_room(patch)
        forbid_reading(patch, True)
        transport = InFlightState(GroupTable())
        plan = migrate(named(homes), ELSEWHERE, [optimizer], transport.table, later=transport)
        assert (transport._journey is None, bool(plan.later.buckets)) == (False, True)  # None: they send
        transport.settle()


def failing_at(number: int, fails: bool) -> Any:
    """Return `unpack` that fails at its call of this number, if it is to fail."""
    calls = itertools.count()

    def unpack(*arguments: Any) -> Any:
        if next(calls) == number and fails:
            raise MemoryError("no memory is left")
        return bsr_run.unpack(*arguments)

    return unpack


def check_a_change_that_was_planned_lately_is_not_planned_again(rank: int, world: int, folder: Path) -> None:
    _, homes = parameters(rank)
    plans = [moved(homes, [], targets) for targets in (ELSEWHERE, BEFORE, ELSEWHERE, BEFORE)]
    assert [plans[0] is plans[2], plans[1] is plans[3]] == [True, True]


def check_versions_tell_of_the_move(rank: int, world: int, folder: Path) -> None:
    _, homes = parameters(rank)
    before = [(home._version, home.local._version) for home in homes]
    moved(homes, [], ELSEWHERE)
    after = [(home._version, home.local._version) for home in homes]
    assert all(new[0] > old[0] and new[1] > old[1] for old, new in zip(before, after, strict=True))


def check_whole_state_is_cut_to_the_new_homes(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    optimizer = torch.optim.SGD(homes, momentum=0.9)
    for home, plain in zip(homes, plains, strict=True):
        optimizer.state[home]["momentum_buffer"] = plain.detach().clone()
    moved(homes, [optimizer], ELSEWHERE)
    for name, home, plain in zip(HOMES, homes, plains, strict=True):
        kept = optimizer.state[home]["momentum_buffer"]
        if name == "scalar":  # a number, which may be a count: whole everywhere
            assert torch.equal(kept, plain.detach())
        else:
            assert torch.equal(kept.local, home.local)


def check_state_that_only_owners_keep_comes_along(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    optimizer = torch.optim.SGD(homes, momentum=0.9)
    for home, plain in zip(homes, plains, strict=True):
        if home.home_layout.annotation.holds(rank):
            kept = HomeTensor.from_full(plain.detach(), home.home_layout)
            optimizer.state[home].update(momentum_buffer=kept, step=7)
    moved(homes, [optimizer], ELSEWHERE)
    assert_same([optimizer.state[home]["momentum_buffer"] for home in homes], plains)
    assert all(optimizer.state[home]["step"] == 7 for home in homes)


def check_state_that_an_owner_has_lost_is_refused_everywhere(rank: int, world: int, folder: Path) -> None:
    _, homes = parameters(rank)
    optimizer = torch.optim.SGD(homes, momentum=0.9)
    optimizer.step()
    if rank == 2:
        del optimizer.state[named(homes)["uneven"]]
    with pytest.raises(StateError, match="rank 2 owns a part of 'uneven' but has no optimizer 0 momentum_buffer"):
        moved(homes, [optimizer], ELSEWHERE)
    assert {name: home.home_layout.annotation for name, home in named(homes).items()} == BEFORE


def check_ranks_that_want_different_homes_are_refused(rank: int, world: int, folder: Path) -> None:
    _, homes = parameters(rank)
    with pytest.raises(StateError, match="do the same to the model and its optimizers on all ranks"):
        moved(homes, [], ELSEWHERE if rank else BEFORE)


def check_what_fails_on_one_rank_fails_on_all_and_changes_nothing(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    stranger = torch.optim.SGD([torch.zeros(3)] if rank == 1 else homes)
    with pytest.raises(StateError, match=r"optimizer 0 \(SGD\) holds 1 parameters that are none of the model's"):
        moved(homes, [stranger], ELSEWHERE)
    assert_same(homes, plains)


def check_state_of_another_shape_at_home_is_refused(rank: int, world: int, folder: Path) -> None:
    _, homes = parameters(rank)
    optimizer = torch.optim.SGD(homes)
    first = named(homes)
    optimizer.state[first["uneven"]]["row"] = first["alone"].detach()
    with pytest.raises(StateError, match="optimizer 0 row of parameter 'uneven' is a home tensor of shape"):
        moved(homes, [optimizer], ELSEWHERE)


def check_lists_inside_the_state_move_as_well(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    optimizer = torch.optim.SGD(homes)
    for home, plain in zip(homes, plains, strict=True):
        optimizer.state[home]["history"] = [HomeTensor.from_full(plain.detach(), home.home_layout), Tensor([1.0])]
    plan = moved(homes, [optimizer], ELSEWHERE)
    assert "optimizer 0 history/0" in {tensor.kind for tensor in plan.tensors}
    assert_same([optimizer.state[home]["history"][0] for home in homes], plains)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
