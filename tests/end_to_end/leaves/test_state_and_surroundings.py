"""State that a leaf writes, numbers that it draws, and what compiles and exports graphs that have one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import ExportError, StateError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.leaves.leaf_ops import LEAF
from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.plans.plan import Plan
from tests.end_to_end.leaves.kinds import Codes, Model, Noisy, batch_of, made
from tests.end_to_end.leaves.test_leaves import PLANS


def model_with(part: nn.Module) -> Model:
    torch.manual_seed(0)
    return Model(middle=hetu_fx.leaf(part)).double()


@pytest.mark.parametrize("plan", PLANS)
def test_buffers_that_it_writes_are_those_of_one_device(plan: str) -> None:
    torch.manual_seed(0)
    model, batches = model_with(Codes()), [batch_of(8), batch_of(6)]
    alone, found = train_alone(model, batches, Lockstep()), Lockstep().train(model, batches, PLANS[plan])
    assert int(alone.state["middle.used"].sum()) == 14
    for name, value in alone.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=1e-10, atol=1e-12)


class Normed(nn.Module):
    """Has a norm, whose statistics are written to without any count of that, and moves codes by `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, h: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(h.detach().mean(0))  # type: ignore[operator, union-attr]
        return self.norm(h) * self.mean if float(h.abs().max()) < 99 else h


class Asked(nn.Module):
    """Is given a size, once of rows and once of columns, and casts inside."""

    def forward(self, h: Tensor, size: int) -> Tensor:
        return h * size if float(h.abs().max()) < 99 else h


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.asked, self.layer = hetu_fx.leaf(Asked()), nn.Linear(6, 6)

    def forward(self, h: Tensor) -> Tensor:
        h = self.asked(h, h.shape[1]) + self.asked(h, h.shape[0]).tanh()
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(h).double()


@pytest.mark.parametrize("part", [Normed, Sized])
@pytest.mark.parametrize("plan", PLANS)
def test_statistics_and_sizes_are_those_of_one_device(part: type[nn.Module], plan: str) -> None:
    torch.manual_seed(0)
    model, batches = Model(middle=part()).double(), [batch_of(8), batch_of(6)]
    if part is Normed:
        hetu_fx.leaf(model.middle)
    alone, found = train_alone(model, batches, Lockstep()), Lockstep().train(model, batches, PLANS[plan])
    for name, value in alone.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=1e-10, atol=1e-12)


def trained(plan: Plan, seed: int = 0) -> Trained:
    return Lockstep(seed=seed).train(model_with(Noisy()), [batch_of(8), batch_of(8)], plan)


def test_what_it_draws_is_the_same_under_every_plan_and_another_in_every_step() -> None:
    one = trained(Plan.data_parallel((0,)))
    assert one.steps[0].loss != one.steps[1].loss
    for plan in PLANS.values():
        several = trained(plan)
        for step, own in zip(several.steps, one.steps, strict=True):
            assert step.loss == pytest.approx(own.loss, rel=1e-10)
            for name, gradient in own.gradients.items():
                torch.testing.assert_close(step.gradients[name], gradient, rtol=1e-9, atol=1e-12)
    assert trained(Plan.data_parallel((0,)), seed=1).steps[0].loss != one.steps[0].loss


def parallel(part: nn.Module, **how: object) -> Model:
    model: Model = hetu_fx.auto_parallelize(model_with(part), batch_of(8), plan=Plan.data_parallel((0,)), **how)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("kind", ["pairs", "experts"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_is_around_it_is_compiled(kind: str, backend: str) -> None:
    model, part = made(kind)
    plain, _ = made(kind)
    hetu_fx.leaf(part)
    hetu_fx.auto_parallelize(model, batch_of(8), plan=Plan.data_parallel((0,)), compile=backend, check=False)
    for rows in (8, 6, 7):
        loss, own = model(**batch_of(rows)), plain(**batch_of(rows))
        loss.backward()
        own.backward()
        torch.testing.assert_close(loss.detach(), own.detach())
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(torch.as_tensor(parameter.grad), expected.grad, msg=name)


def test_it_runs_in_evaluation_and_in_inference_mode() -> None:
    model = parallel(Codes(), check=False)
    before = model.middle.codes.clone()  # type: ignore[operator]
    with torch.inference_mode():
        model.eval()(**batch_of(6))
    torch.testing.assert_close(model.middle.codes, before)


def test_it_is_not_exported(tmp_path: Path) -> None:
    model = parallel(Codes(), check=False)
    model(**batch_of(8)).backward()
    with pytest.raises(ExportError, match=r"calls middle \(Codes\) as it is"):
        model.hetu.export(tmp_path / "out")  # type: ignore[operator]


def test_explain_names_what_is_gathered_for_it() -> None:
    model, _ = made("pairs")
    graph = capture(model, batch_of(8))
    (node,) = graph.graph.find_nodes(op="call_function", target=LEAF)
    assert str(node.args[4]).startswith("loss (Pairs) ")


def test_programs_with_leaves_are_the_same_on_ranks_that_have_counted_other_captures() -> None:
    programs = [Lockstep().capture(model_with(Codes()), batch_of(8)).programs.current for _ in range(2)]
    first, second = (program.graph.leaf_calls[0].name for program in programs if program is not None)
    assert first != second
    assert len({program.fingerprint for program in programs if program is not None}) == 1


def test_a_plan_is_tried_with_leaves_in_the_model() -> None:
    model = parallel(Codes(), check=True)
    (check,) = model.hetu.checks.values()  # type: ignore[operator]
    assert str(check).startswith("checked: loss and 4 gradients are those of the module")


class Turns(nn.Module):
    """Makes another form of output for some values than it did when it was tried."""

    def forward(self, h: Tensor) -> Tensor:
        return h[:, :3].repeat(1, 2) if h.abs().max() < 9 else h[:, :3]


def test_a_result_of_another_form_is_an_error_of_the_step() -> None:
    model = parallel(Turns(), check=False)
    model(**batch_of(8)).backward()
    with torch.no_grad():
        model.body.bias.fill_(0)
    batch = batch_of(8)
    model.middle.register_forward_pre_hook(lambda module, args: (args[0] * 1e9,))
    with pytest.raises(StateError, match=r"middle \(Turns\) made its result.*and now as"):
        model(**batch)


class Penalised(nn.Module):
    """Adds the gradient of what a leaf makes to the loss."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.body, self.part = nn.Linear(6, 6), hetu_fx.leaf(part)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        made = self.part(h).square().sum()
        (slope,) = torch.autograd.grad(made, h, create_graph=True)
        return made + slope.square().sum()


def test_a_gradient_of_a_leaf_in_the_loss_is_refused_by_name() -> None:
    model = Penalised(Turns()).double()
    how = {"plan": Plan.data_parallel((0,)), "check": False}
    parallel = hetu_fx.auto_parallelize(model, {"x": batch_of(8)["x"]}, **how)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"a gradient of leaf part \(Turns\) is part of the loss"):
        parallel(x=batch_of(8)["x"]).backward()
