"""Parameters that are gathered unit by unit: the numbers of zero 1, bit for bit, two units at once, none afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import PlanError, StateError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.captures import Programs
from hetu_fx.switching.eager.execution import EagerExecution
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.step.unit_buffers import UnitBuffers
from tests.switching.in_threads import as_two_ranks, runtime_of
from tests.switching.step.unit_models import Words, adapted, assert_same, batch, frozen, plain, words

BATCHES = [batch(seed=seed) for seed in range(3)]
ADAM = partial(torch.optim.AdamW, lr=1e-2)
PAIR = Plan.data_parallel(2)
UNITS = Plan.data_parallel(2, zero=3)
UNEVEN = Plan.data_parallel(2, (1, 3))


def group(*devices: int, ratios: tuple[int, ...] = ()) -> Pipeline:
    return Pipeline((Stage(devices, ratios),))


def same_as_zero_1(model: nn.Module, plan: Plan, *zeros: int, **how: Any) -> None:
    """Train under zero 1 and others, and compare all numbers; zero 1 is compared with one device."""
    lockstep = Lockstep(ADAM, **how)
    captured = lockstep.capture(model, BATCHES[0])
    expected = lockstep.train(model, BATCHES, plan, captured)
    alone = train_alone(model, BATCHES, lockstep)
    torch.testing.assert_close(expected.state, dict(alone.state), rtol=1e-9, atol=1e-9)
    for zero in zeros:
        assert_same(lockstep.train(model, BATCHES, replace(plan, zero=zero), captured), expected)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_replicas_give_the_numbers_of_zero_1_bit_for_bit(zero: int) -> None:
    same_as_zero_1(words(), PAIR, zero)


@pytest.mark.parametrize(
    "make", [words, frozen, adapted, plain, partial(words, tied=True)], ids=["words", "frozen", "lora", "plain", "tied"]
)
def test_homes_of_3_to_1_against_rows_of_1_to_3_give_them_too(make: Callable[[], nn.Module]) -> None:
    same_as_zero_1(make(), UNEVEN, 2, 3, cluster=Cluster.on_paper([3e9, 1e9]))


def test_dropout_draws_the_same_numbers_when_units_are_gathered_again() -> None:
    model, how = words(p=0.3), Lockstep(ADAM)
    captured = how.capture(model, BATCHES[0])
    first, last = (how.train(model, BATCHES, replace(UNEVEN, zero=zero), captured) for zero in (1, 3))
    assert_same(last, first)


def test_blocks_that_are_recomputed_read_what_is_gathered_again() -> None:
    plan = Plan(tuple(Pipeline((Stage((rank,), recompute=3),)) for rank in range(2)))
    same_as_zero_1(words(), plan, 3)


def test_compiled_pieces_read_what_is_gathered() -> None:
    same_as_zero_1(words(tied=True), UNEVEN, 3, backend="aot_eager")


@pytest.mark.parametrize(
    "plan",
    [
        Plan((group(0, 1), group(2, 3))),
        Plan((group(0, 1, ratios=(3, 1)), replace(group(2), share=2))),
        Plan.tensor_parallel(2),
    ],
    ids=["two pairs", "a pair and a device", "a pair alone"],
)
def test_tensor_parallel_replicas_gather_units_of_their_shards(plan: Plan) -> None:
    same_as_zero_1(words(), plan, 2, 3)


def test_ranks_without_work_go_through_all_units_with_the_others() -> None:
    same_as_zero_1(words(tied=True), Plan.data_parallel((0, 2)), 2, 3, ranks=3)


def test_a_replica_without_rows_goes_through_them_too() -> None:
    lone, how = [batch(rows=1, seed=seed) for seed in range(3)], Lockstep(ADAM)
    captured = how.capture(words(), BATCHES[0])
    first, last = (how.train(words(), lone, replace(PAIR, zero=zero), captured) for zero in (1, 3))
    assert_same(last, first)


class Shared(nn.Module):
    """Reads its blocks twice, the second time two at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        first, _, third, _ = self.blocks
        return (x @ first.weight @ third.weight + self.blocks[1](x)).pow(2).mean()


def test_units_that_are_read_again_together_do_not_take_each_others_place() -> None:
    torch.manual_seed(0)
    how, model = Lockstep(ADAM), Shared().double()
    batches = [{"x": torch.randn(4, 40, dtype=torch.float64)} for _ in range(3)]
    captured = how.capture(model, batches[0])
    first, last = (how.train(model, batches, replace(UNEVEN, zero=zero), captured) for zero in (1, 3))
    assert_same(last, first)


def test_rows_of_ranks_own_are_moved_as_under_zero_1() -> None:
    same_as_zero_1(words(), UNEVEN, 3, rows=(3, 1))


class Normalized(nn.Module):
    """Its replicas talk amid the model, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.pow(2).mean()


def test_replicas_that_talk_amid_the_model_gather_in_between() -> None:
    torch.manual_seed(0)
    how, model = Lockstep(ADAM), Normalized().double()
    batches = [{"x": torch.randn(8, 40, dtype=torch.float64)} for _ in range(3)]
    captured = how.capture(model, batches[0])
    first, last = (how.train(model, batches, replace(UNEVEN, zero=zero), captured) for zero in (1, 3))
    assert_same(last, first)


def test_variants_of_unlike_zero_share_homes_and_homes_move_under_zero_3() -> None:
    how = Lockstep(ADAM, plan_of_step=(0, 1, 1, 0, 1), lost_by_step=[()] * 5)
    batches, model = [batch(seed=seed) for seed in range(5)], words(tied=True)
    captured = how.capture(model, batches[0])
    plans = [[Plan.tensor_parallel(2), replace(UNEVEN, zero=zero)] for zero in (1, 3)]
    first, last = (how.train(model, batches, given, captured) for given in plans)
    assert sum(moved.num_messages for moved in last.moved.values())
    assert_same(last, first)


def started(table: GroupTable, model: nn.Module, plan: Plan = UNITS) -> Runtime:
    return runtime_of(table, model, BATCHES[0], plan=plan)


def buffers_of(runtime: Runtime) -> UnitBuffers:
    (variant,) = runtime.variants.values()
    (buffers,) = variant.compute.buffers
    return buffers


def loss_of(runtime: Runtime, number: int = 0) -> Tensor:
    loss: Tensor = runtime.run((), BATCHES[number])
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in named.items()}


def assert_gradients(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(gradients(found), gradients(expected), rtol=1e-10, atol=1e-12)


@as_two_ranks
def test_at_most_two_units_are_gathered_at_once_and_none_after_a_step(table: GroupTable) -> None:
    runtime = started(table, words())
    loss = loss_of(runtime)
    buffers = buffers_of(runtime)
    assert (buffers.live_bytes, buffers.present) == (0, set())
    loss.backward()
    assert (buffers.live_bytes, buffers.present) == (0, set())
    assert len(buffers.plan.units) == 5
    assert 0 < buffers.most_bytes <= buffers.plan.most_bytes
    assert buffers.num_gathers == 2 * 5
    assert buffers.num_bytes < sum(buffers.plan.num_bytes)
    before = buffers.num_bytes
    loss_of(runtime).backward()
    assert buffers_of(runtime) is buffers
    assert (buffers.num_bytes, buffers.num_gathers) == (before, 4 * 5)


@as_two_ranks
def test_the_gradients_of_one_unit_have_arrived_before_those_of_the_next_are_packed(table: GroupTable) -> None:
    runtime = started(table, words())
    loss = loss_of(runtime)
    buffers, under_way = buffers_of(runtime), list[int]()
    start, open_ = buffers.bridge.reduce_start, set[int]()

    def noted(number: int, grads: Mapping[str, Tensor | None]) -> Any:
        under_way.append(len(open_))
        open_.add(number)
        handle = start(number, grads)

        def wait() -> dict[str, Tensor]:
            open_.remove(number)
            return handle.wait()

        return SimpleNamespace(wait=wait)

    with patch.object(buffers.bridge, "reduce_start", noted):
        loss.backward()
    assert (under_way, open_) == ([0] * len(buffers.plan.units), set())


@as_two_ranks
def test_a_tied_weight_is_gathered_for_both_of_its_readers(table: GroupTable) -> None:
    runtime = started(table, words(tied=True))
    loss_of(runtime).backward()
    plan = buffers_of(runtime).plan
    assert plan.visits[-1] == {0, 4}
    assert len(set(plan.slots)) == 3
    assert buffers_of(runtime).live_bytes == 0


@as_two_ranks
def test_units_before_the_first_trained_parameter_are_not_gathered_again(table: GroupTable) -> None:
    runtime = started(table, frozen())
    loss_of(runtime).backward()
    assert buffers_of(runtime).num_gathers == 5 + 3
    assert buffers_of(runtime).live_bytes == 0


@as_two_ranks
def test_evaluation_leaves_nothing_gathered(table: GroupTable) -> None:
    model = words()
    expected = copy.deepcopy(model).eval()(**BATCHES[0])
    runtime = started(table, model)
    model.eval()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(loss_of(runtime), expected.detach(), rtol=1e-10, atol=1e-10)
    assert [one.live_bytes for one in next(iter(runtime.variants.values())).compute.buffers] == [0]
    model.train()
    loss_of(runtime).backward()
    alone = words()
    alone(**BATCHES[0]).backward()
    assert_gradients(model, alone)


@as_two_ranks
def test_a_backward_that_keeps_its_graph_gathers_again_for_the_next(table: GroupTable) -> None:
    model, alone = words(), words()
    runtime = started(table, model)
    for one, loss in ((model, loss_of(runtime)), (alone, alone(**BATCHES[0]))):
        loss.backward(retain_graph=True)
        loss.backward()
        assert one.head.weight.grad is not None
    assert_gradients(model, alone)
    assert buffers_of(runtime).live_bytes == 0


@as_two_ranks
def test_two_forwards_before_a_backward_have_leaves_of_their_own(table: GroupTable) -> None:
    model, alone = words(), words()
    runtime = started(table, model)
    losses = [loss_of(runtime, number) for number in range(2)]
    (losses[0] + 3 * losses[1]).backward()
    (alone(**BATCHES[0]) + 3 * alone(**BATCHES[1])).backward()
    assert_gradients(model, alone)
    first, second = loss_of(runtime, 0), loss_of(runtime, 2)
    first.backward()
    second.backward()
    alone(**BATCHES[0]).backward()
    alone(**BATCHES[2]).backward()
    assert_gradients(model, alone)
    assert buffers_of(runtime).live_bytes == 0


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_add_up_at_home_within_no_sync(zero: int) -> None:
    def rank(table: GroupTable) -> None:
        model, alone = words(), words()
        runtime = started(table, model, replace(UNEVEN, zero=zero))
        with runtime.no_sync():
            loss_of(runtime, 0).backward()
            assert not any(variant.kept_back.local for variant in runtime.variants.values())
            weight = model.blocks[0].up.weight
            assert weight.grad.local.numel() == weight.numel() // 2
        loss_of(runtime, 1).backward()
        alone(**BATCHES[0]).backward()
        alone(**BATCHES[1]).backward()
        assert_gradients(model, alone)

    run_in_threads(2, rank)


@as_two_ranks
def test_a_rehearsal_leaves_nothing_gathered_nor_changed(table: GroupTable) -> None:
    model, alone = words(), words()
    runtime = started(table, model)
    runtime.warm((), BATCHES[0])
    assert buffers_of(runtime).live_bytes == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_of(runtime).backward()
    alone(**BATCHES[0]).backward()
    assert_gradients(model, alone)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@as_two_ranks
def test_inputs_and_outputs_have_gradients_as_on_one_device(table: GroupTable) -> None:
    torch.manual_seed(0)
    model = Scores().double()
    alone, x = copy.deepcopy(model), torch.randn(4, 40, dtype=torch.float64)
    model.blocks[0].requires_grad_(False)
    runtime = runtime_of(table, model, {"x": x}, plan=UNITS)
    own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = runtime.run((), {"x": own})
    out.pow(2).mean().backward()
    alone(other).pow(2).mean().backward()
    torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients(model)["blocks.2.weight"], alone.blocks[2].weight.grad, rtol=1e-10, atol=1e-12)
    assert model.blocks[0].weight.grad is None
    assert buffers_of(runtime).live_bytes == 0


@as_two_ranks
def test_an_error_amid_a_step_leaves_nothing_gathered(table: GroupTable) -> None:
    model, alone = words(), words()
    runtime = started(table, model)
    loss_of(runtime).backward()
    model.zero_grad()
    buffers, hold = buffers_of(runtime), UnitBuffers.hold
    for backward in (False, True):
        loss = loss_of(runtime) if backward else None

        def failing(self: UnitBuffers, units: Any, pieces: Any) -> None:
            hold(self, units, pieces)
            if 2 in units:
                raise RuntimeError("amid a step")

        buffers.hold = partial(failing, buffers)  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="amid a step"):
            loss_of(runtime) if loss is None else loss.backward()
        del buffers.hold
        assert (buffers.live_bytes, buffers.present) == (0, set())
        del loss
    model.zero_grad()
    loss_of(runtime).backward()
    alone(**BATCHES[0]).backward()
    assert_gradients(model, alone)


@as_two_ranks
def test_parameters_that_were_written_to_before_the_backward_are_refused(table: GroupTable) -> None:
    model = words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime = started(table, model)
    loss_of(runtime).backward()
    late = loss_of(runtime)
    optimizer.step()
    with pytest.raises(StateError, match="written to between a step's forward and its backward"):
        late.backward()
    model.zero_grad()
    loss_of(runtime).backward()
    assert buffers_of(runtime).live_bytes == 0


class HandsOnViews(nn.Module):
    """Takes its blocks' weights apart before any of them runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 40, 40, dtype=torch.float64))
        self.blocks = nn.ModuleList(nn.Linear(40, 40, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights.unbind(0)
        for block, weight in zip(self.blocks, weights, strict=True):
            x = torch.tanh(block(x) @ weight)
        return x.sum()


def test_a_view_of_parameters_that_outlives_its_unit_is_refused() -> None:
    how, example = Lockstep(ADAM), {"x": torch.randn(4, 40, dtype=torch.float64)}
    with pytest.raises(StateError, match=r"values \[0, 1\] of what is made there are views of them"):
        how.train(HandsOnViews(), [example], replace(PAIR, zero=3))
    how.train(HandsOnViews(), [example], replace(PAIR, zero=2))


class HandsOnParameters(Shared):
    """Returns a weight as it is, and a number that is made of it."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.blocks[0].weight


def test_parameters_are_not_returned_from_memory_that_others_take_turns_in() -> None:
    def rank(table: GroupTable, plan: Plan) -> Tensor:
        torch.manual_seed(0)
        model = HandsOnParameters().double().eval()
        x = {"x": torch.randn(4, 40, dtype=torch.float64)}
        with torch.no_grad():
            return runtime_of(table, model, x, plan=plan).run((), x)[1].sub(model.blocks[0].weight).abs().max()

    with pytest.raises(PlanError, match=r"returns its parameters \['blocks.0.weight'\] as they are.*\nhint"):
        run_in_threads(2, partial(rank, plan=UNITS))
    assert run_in_threads(2, partial(rank, plan=replace(UNITS, zero=2))) == [0, 0]


def test_leaves_are_refused_where_their_unit_is_not_gathered() -> None:
    def rank(table: GroupTable) -> None:
        runtime = started(table, words())
        loss_of(runtime).backward()
        (variant,) = runtime.variants.values()
        (buffers,) = variant.compute.buffers
        walk = variant.compute.walk(buffers.plan, buffers.bridge, 0)
        with walk.forward():
            walk.gather(2)
            with pytest.raises(StateError, match=r"units \[1\] are read where they are not gathered: .* visit 2"):
                walk.gather(1)
            with pytest.raises(StateError, match=r"units \[3\] are read where they are not gathered"):
                walk.go_back_to(3)
            other = variant.compute.walk(buffers.plan, buffers.bridge, 0)
            with pytest.raises(StateError, match="while another step's units"), other.forward():
                pass

    run_in_threads(2, rank)


def test_pipelines_keep_parameters_for_the_step_and_say_so() -> None:
    plan = Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2), Pipeline((Stage((2,)),))))
    how, model = Lockstep(ADAM), words()
    captured = how.capture(model, BATCHES[0])
    first = how.train(model, BATCHES, plan, captured)
    with pytest.warns(UserWarning, match="keeps parameters gathered for the whole step, as zero 2 does"):
        last = how.train(model, BATCHES, replace(plan, zero=3), captured)
    assert_same(last, first)
    assert "zero 3 (parameters for the whole step)" in str(replace(plan, zero=3))


def test_what_zero_3_does_not_take_is_refused_by_name() -> None:
    how, low = Lockstep(ADAM), Plan(tuple(Pipeline((Stage((rank,), dtype="bfloat16"),), 1) for rank in range(2)))
    with pytest.raises(PlanError, match="zero 3 and stages of dtype 'bfloat16'"):
        how.train(Words().double(), BATCHES, replace(low, zero=3))
    recorded = GraphExecution(Programs(words(), None), BATCHES[0], None, replays=True)
    with pytest.raises(PlanError, match="needs them where they were"):
        recorded.check(UNITS, 2)
    with pytest.raises(PlanError, match="zero 3, but capture='eager' calls the module itself"):
        EagerExecution(words(), None, BATCHES[0]).check(UNITS, 2)


def test_a_model_alone_is_not_cut_into_units() -> None:
    how, model = Lockstep(ADAM), words()
    assert_same(how.train(model, BATCHES, Plan.data_parallel(1, zero=3)), how.train(model, BATCHES, Plan.single()))
