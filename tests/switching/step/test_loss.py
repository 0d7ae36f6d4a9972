"""The loss of a step and its gradient, which travel while nobody waits for them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from hetu_fx.comm_ops.wire.collectives import Exchange
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import DivergedError
from hetu_fx.switching.home.async_tensor import Pending
from hetu_fx.switching.step import loss as step
from hetu_fx.switching.step.loss import GlobalLoss, LossGradient, PredictedLossGrad, SeenLoss, apply_outside_transforms
from hetu_fx.switching.step.timer import ComputeTimer


class Sums:
    """Sums over two ranks of which the other always sends `other`; a sum is there once it has been waited for."""

    def __init__(self, other: float) -> None:
        self.other, self.waited = other, 0

    def start(self, tensor: Tensor, table: GroupTable, what: str = "") -> Exchange:
        def finish() -> None:
            self.waited += 1
            tensor.add_(self.other)

        return Exchange(finish=finish)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    made = Sums(other=2.0)
    for name in ("_started_sum", "start_marked_sum"):
        monkeypatch.setattr(step, name, made.start)
    return made


def global_loss(local: Tensor, gradient: LossGradient | None = None) -> Tensor:
    gradient = gradient or LossGradient(GroupTable.dry(0, 2), PredictedLossGrad())
    loss: Tensor = apply_outside_transforms(GlobalLoss, local, gradient, True, 1.0, ComputeTimer())
    return loss


def test_backward_starts_before_the_loss_has_come(sums: Sums) -> None:
    local = torch.tensor(1.0, requires_grad=True)
    loss = global_loss(local)
    loss.backward()
    assert sums.waited == 0
    assert local.grad == 1.0
    assert (loss.item(), sums.waited) == (3.0, 1)


def test_a_pending_loss_reads_as_any_loss(sums: Sums) -> None:
    loss = global_loss(torch.tensor(1.5, requires_grad=True))
    assert isinstance(loss, Pending)
    assert f"{loss:.2f}" == "3.50"
    assert "3.5" in repr(loss)
    assert type(loss / 2) is type(loss.detach()) is type(loss.data) is Tensor
    assert (loss / 2).requires_grad
    assert loss.detach().numpy() == loss.tolist() == 3.5
    assert copy.deepcopy(loss.detach()) == pickle.loads(pickle.dumps(loss)) == copy.deepcopy(loss) == 3.5
    assert sum([loss, loss]) == torch.stack([loss, loss]).sum() == 7.0
    assert sums.waited == 1


class Message:
    """A sum under way, which arrives when it is told to."""

    def __init__(self) -> None:
        self.is_there, self.waited = False, 0

    def is_completed(self) -> bool:
        return self.is_there

    def wait(self) -> None:
        assert self.is_there, "whoever looks on does not wait"
        self.waited += 1


def test_who_looks_on_waits_for_no_loss_and_sees_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Message()
    monkeypatch.setattr(step, "_started_sum", lambda *what: Exchange((0, 1), [message], table=GroupTable()))
    loss = global_loss(torch.tensor(1.5, requires_grad=True))
    seen = SeenLoss(loss)
    assert seen.number is None
    message.is_there = True
    assert (seen.number, message.waited) == (1.5, 1)
    loss.detach().zero_()
    assert (seen.number, message.waited, loss.item()) == (1.5, 1, 0.0)


def test_what_is_no_single_number_is_no_loss_to_see() -> None:
    assert SeenLoss().number is None
    assert SeenLoss(torch.ones(2)).number is None
    assert SeenLoss(torch.tensor(2.0, requires_grad=True)).number == 2.0


def test_a_loss_without_backward_is_plain(sums: Sums) -> None:
    loss = global_loss(torch.tensor(1.0))
    assert (type(loss), float(loss), sums.waited) == (Tensor, 3.0, 1)


def test_changing_a_pending_loss_in_place_changes_the_sum(sums: Sums) -> None:
    loss = global_loss(torch.tensor(1.0, requires_grad=True))
    loss.mul_(2)
    assert loss.item() == 6.0


def test_what_backward_made_is_corrected_by_the_average(sums: Sums) -> None:
    """What this rank halves before the sum is 4 / 2; the other's share is 2."""
    guess, local = PredictedLossGrad(), torch.tensor(1.0, requires_grad=True)
    gradient = LossGradient(GroupTable.dry(0, 2), guess)
    (global_loss(local, gradient) * 4).backward()
    assert local.grad == 1.0
    assert gradient.correction() == 4.0
    assert guess.value == 4.0


def test_the_last_average_is_the_next_guess(sums: Sums) -> None:
    local = torch.tensor(1.0, requires_grad=True)
    gradient = LossGradient(GroupTable.dry(0, 2), PredictedLossGrad(4.0))
    (global_loss(local, gradient) * 4).backward()
    assert local.grad == 4.0
    assert gradient.correction() == 1.0


@pytest.mark.parametrize("useless", [0.0, float("inf"), float("nan")])
def test_nothing_is_guessed_that_cannot_be_corrected(useless: float, sums: Sums) -> None:
    sums.other, guess = useless, PredictedLossGrad(3.0)
    gradient = LossGradient(GroupTable.dry(0, 2), guess)
    gradient.begin(torch.tensor(0.0))
    assert str(gradient.correction()) == str(useless / 3)
    assert guess.value == 3.0


def test_what_ran_ahead_is_corrected_by_all_of_the_average(sums: Sums) -> None:
    gradient = LossGradient(GroupTable.dry(0, 2), PredictedLossGrad(4.0), ran_with=1.0)
    gradient.begin(torch.tensor(4.0))
    assert gradient.correction() == 4.0


def test_a_loss_that_is_not_asked_needs_no_correction() -> None:
    assert LossGradient(GroupTable.dry(0, 2), PredictedLossGrad(4.0)).correction() == 1.0


def test_one_process_runs_with_what_comes_in() -> None:
    gradient, local = LossGradient(GroupTable.dry(0, 1), PredictedLossGrad()), torch.tensor(1.0, requires_grad=True)
    (global_loss(local, gradient) * 0.3).backward()
    assert local.grad == torch.tensor(0.3)
    assert gradient.correction() == 1.0


def test_the_average_is_waited_for_once_however_often_it_is_asked_for(sums: Sums) -> None:
    gradient = LossGradient(GroupTable.dry(0, 2), PredictedLossGrad())
    gradient.begin(torch.tensor(4.0))
    assert gradient.correction() == gradient.correction() == 4.0
    assert sums.waited == 1


def test_in_float16_backward_waits_for_the_average(sums: Sums) -> None:
    guess = PredictedLossGrad(4.0)
    gradient = LossGradient(GroupTable.dry(0, 2), guess, exact=True)
    assert gradient.begin(torch.tensor(6.0)) == 6.0 / 2 + sums.other
    assert (gradient.correction(), guess.value) == (1.0, 5.0)


def test_in_float16_what_ran_ahead_under_another_scale_runs_again_with_the_average(sums: Sums) -> None:
    gradient = LossGradient(GroupTable.dry(0, 2), PredictedLossGrad(), ran_with=1.0, exact=True)
    assert gradient.begin(torch.tensor(6.0)) == 1.0
    assert gradient.correction() == 5.0
    assert gradient.ran_again() == 5.0
    assert gradient.correction() == 1.0


def test_losses_of_unlike_steps_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    monkeypatch.setattr(step, "sum_all", lambda buffer, ranks: sent.append(buffer.tensor) or Exchange())
    first, second = (LossGradient(GroupTable.dry(0, 2), PredictedLossGrad(), step=number) for number in (1, 2))
    for gradient in (first, second):
        gradient.begin(torch.tensor(1.0))
    sent[0] += sent[1]
    with pytest.raises(DivergedError, match="backward of the loss of step 1"):
        first.correction()
