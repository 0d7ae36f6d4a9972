"""All ranks of a plan in one process: what comes out is what one device makes, and what is unlike is told."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from hetu_fx.check.verdict import judge
from hetu_fx.comm_ops.wire import threads
from hetu_fx.errors import DivergedError, PlanError, ProfileError
from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.tracer import Tracer
from tests.end_to_end.cells import LOSS_FNS, Mlp, mlp_batch

HOW = Lockstep(partial(torch.optim.AdamW, lr=1e-2), loss_fn=LOSS_FNS["mlp"])
SHARES = Plan.data_parallel((0, 1, 2), (3, 1, 2))
GROUPS = Plan((Pipeline((Stage((0, 1, 2), (2, 1, 1)),), share=2), Pipeline((Stage((3,)),))))


def model() -> nn.Module:
    torch.manual_seed(3)
    return Mlp().double()


def batches(*rows: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(4)
    return [mlp_batch(count, 0) for count in rows]


def check_equal(made: Trained, given: list[dict[str, torch.Tensor]], how: Lockstep = HOW) -> None:
    verdict = judge("plan", train_alone(model(), given, how), made, 1e-10, "")
    assert verdict.verdict == "equal", verdict


@pytest.mark.parametrize("plan", [SHARES, GROUPS], ids=["replicas of unequal shares", "a group beside a device"])
def test_a_training_is_that_of_one_device(plan: Plan) -> None:
    given = batches(12, 7, 5)
    check_equal(HOW.train(model(), given, plan), given)


def test_ranks_bring_their_own_rows() -> None:
    given = batches(9, 9)
    check_equal(
        Lockstep(HOW.make_optimizer, rows=(5, 0, 3, 1), loss_fn=HOW.loss_fn).train(model(), given, GROUPS), given
    )


def test_of_a_smaller_batch_the_last_ranks_bring_fewer_rows() -> None:
    given = batches(9, 6, 2)
    check_equal(
        Lockstep(HOW.make_optimizer, rows=(5, 0, 3, 1), loss_fn=HOW.loss_fn).train(model(), given, GROUPS), given
    )


def test_a_batch_of_more_rows_than_ranks_bring_is_refused() -> None:
    with pytest.raises(PlanError, match=r"a batch has 9 rows, but ranks bring \[5, 0, 2, 1\]\nhint: give more rows"):
        Lockstep(rows=(5, 0, 2, 1), loss_fn=HOW.loss_fn).train(model(), batches(9), GROUPS)


def test_the_plan_changes_between_steps() -> None:
    given = batches(6, 6, 6)
    how = Lockstep(HOW.make_optimizer, plan_of_step=(0, 1, 0), loss_fn=HOW.loss_fn)
    check_equal(how.train(model(), given, (SHARES, GROUPS)), given)


def test_the_model_is_captured_once_and_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, trace = [], Tracer.trace
    monkeypatch.setattr(Tracer, "trace", lambda self, *args: traced.append(1) or trace(self, *args))
    mine = model()
    before = copy.deepcopy(mine.state_dict())
    HOW.train(mine, batches(6, 6), SHARES)
    assert len(traced) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in mine.state_dict().items())
    assert not any(hasattr(parameter, "home_layout") for parameter in mine.parameters())


def test_two_trainings_have_the_same_bits() -> None:
    given = batches(6, 5)
    first, second = (HOW.train(model(), given, GROUPS) for _ in range(2))
    assert [step.loss for step in first.steps] == [step.loss for step in second.steps]
    assert all(torch.equal(tensor, second.state[name]) for name, tensor in first.state.items())


class LaterRead(nn.Module):
    """A product over parts, with a bias, of what is gathered before: backward sends messages of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(6, 6)), nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((x @ self.weight).cumsum(2).flatten(1)).mean()


def test_a_bias_that_one_device_adds_is_summed_at_the_same_place_by_all() -> None:
    torch.manual_seed(5)
    later, given = LaterRead().double(), [{"x": torch.randn(8, 8, 6, dtype=torch.float64)}]
    how, plan = Lockstep(HOW.make_optimizer), Plan((Pipeline((Stage((0, 1)),)),), zero=0)
    verdict = judge("plan", train_alone(later, given, how), how.train(later, given, plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict


def test_copies_that_differ_are_told_with_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the whole; what is lost on the way to one of them is no part that it counts."""
    whole = Plan((Pipeline((Stage((0,)),)), Pipeline((Stage((1,)),))), zero=0)
    right = threads._all_reduce

    def wrong(reduce, brought):  # type: ignore[no-untyped-def]
        right(reduce, brought)
        first = next(iter(brought.values()))
        if first.is_floating_point() and first.numel() > 100:
            first.view(-1)[-1] += 1.0

    monkeypatch.setattr(threads, "_all_reduce", wrong)
    with pytest.raises(DivergedError, match=r"rank \d has another copy of '.*' than the rank that counts it"):
        HOW.train(model(), batches(6), whole)


def test_rows_of_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="rows are given for 2 ranks, but there are 3\nhint: give one for each"):
        Lockstep(rows=(3, 3), loss_fn=HOW.loss_fn).train(model(), batches(6), SHARES)


def test_a_plan_that_names_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="devices"):
        Lockstep(ranks=2, loss_fn=HOW.loss_fn).train(model(), batches(6), SHARES)


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(ProfileError, match="the model returns no loss"):
        Lockstep().train(model(), batches(6), SHARES)
