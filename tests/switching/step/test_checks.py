"""A forward that checks values trains as on one device, and raises on all ranks where any has rows that fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.check.verdict import judge
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import ForwardCheckError, PlanError
from hetu_fx.graph.graph import OutputKind, OutputLeaf
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.prepare import check_plans_and_choose_homes, make_runtime
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.settings import Settings

PLANS = {
    "one device": Plan.single(0),
    "3:1": Plan.data_parallel((0, 1), (3, 1)),
    "tensor parallel": Plan.tensor_parallel((0, 1), (3, 1)),
    "[0,1] beside [2]": Plan((Pipeline((Stage((0, 1), (3, 1)),), share=2), Pipeline((Stage((2,)),)))),
    "a pipeline of two": Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2),)),
    "a pipeline beside a device": Plan((
        Pipeline((Stage((0,)), Stage((1,))), micro_batches=2, share=2), Pipeline((Stage((2,)),), micro_batches=2),
    )),
}  # fmt: skip
IN_ONE_GO = [name for name in PLANS if "pipeline" not in name]
End = Callable[[Tensor, Tensor, Tensor], Tensor]
pytestmark = pytest.mark.usefixtures("distributions_checked")


class Net(nn.Module):
    """Two layers, and what makes a loss of inputs, labels and their output."""

    def __init__(self, end: End) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.end = end

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        hidden = self.first(x)
        if not torch.isfinite(hidden).all():
            raise OverflowError("hidden")
        return self.end(x, y, self.second(hidden.tanh()))


def labels(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    if y.max() >= 4:
        raise ValueError("a label is too large")
    return F.cross_entropy(h, y)


def activations(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    assert (h.abs() + y[:, None] < 80).all(), "large"
    return F.cross_entropy(h, y % 4)


def normal(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    shared = torch.distributions.Normal(h, F.softplus(h))
    return -shared.log_prob(y[:, None].where(y[:, None] < 4, torch.nan).double()).mean()


def gaussian(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return F.gaussian_nll_loss(h, x[:, :4], 5.0 - y[:, None].double() + h * 0)


def of_all_rows(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    if (h + y[:, None]).mean() > 5:
        raise RuntimeError("a large mean")
    return F.cross_entropy(h, y % 4)


def categorical(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return -torch.distributions.Categorical(logits=h).log_prob(y).mean()


def multivariate(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    turned = (y[:, None, None] >= 4) * torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    covariance = torch.diag_embed(2 + h[:, :2].tanh()) + turned  # which is then not symmetric
    return -torch.distributions.MultivariateNormal(h[:, 2:], covariance).log_prob(x[:, :2]).mean()


ENDS: dict[End, type[Exception]] = {
    labels: ValueError, activations: AssertionError, normal: ValueError, gaussian: ValueError, categorical: ValueError,
    of_all_rows: RuntimeError, multivariate: ValueError,
}  # fmt: skip
CAPTURED: dict[End, tuple[Net, GraphExecution]] = {}


def captured(end: End) -> tuple[Net, GraphExecution]:
    if end not in CAPTURED:
        torch.manual_seed(1)
        model = Net(end)
        CAPTURED[end] = model, Lockstep().capture(model, batch())
    return CAPTURED[end]


def batch(*, fails: bool = False) -> dict[str, Tensor]:
    """Return rows of which the last fails the check of every end, if asked."""
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 4, (8,))
    if fails:
        y[-1] = 90
    return {"x": x, "y": y}


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("name", PLANS)
def test_a_forward_that_checks_trains_as_on_one_device_and_raises_what_it_raises(name: str, end: End) -> None:
    model, execution = captured(end)
    batches, how = [batch(), batch()], Lockstep(seconds=60)
    if end is of_all_rows and name not in IN_ONE_GO:
        with pytest.raises(PlanError, match=r"test_checks\.py:\d+\) needs the rows of the whole batch"):
            how.train(model, batches, PLANS[name], execution)
        return
    verdict = judge("", train_alone(model, batches, how), how.train(model, batches, PLANS[name], execution), 1e-10, "")
    assert verdict.verdict == "equal", verdict
    bad = [batch(), batch(fails=True)]
    with pytest.raises(ENDS[end]):
        train_alone(model, bad, how)
    with pytest.raises(ENDS[end]) as caught:
        how.train(model, bad, PLANS[name], execution)
    assert isinstance(caught.value, ForwardCheckError)
    assert "test_checks.py:" in str(caught.value)


@pytest.mark.parametrize("name", PLANS)
def test_a_check_in_an_early_stage_is_raised_by_all(name: str) -> None:
    model, execution = captured(activations)
    bad = batch()
    bad["x"][3] = float("inf")
    with pytest.raises(OverflowError, match="hidden"):
        Lockstep().train(model, [batch(), bad], PLANS[name], execution)


class Bounded(Net):
    """Checks a parameter, which it also trains."""

    def __init__(self) -> None:
        super().__init__(labels)
        self.register_buffer("most", torch.tensor(1e9, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.first.bias.abs().sum().item() > self.most.item():
            raise ValueError("a large bias")
        return super().forward(x, y)


@pytest.mark.parametrize("name", PLANS)
def test_a_parameter_is_checked_under_every_plan_and_has_its_gradient(name: str) -> None:
    torch.manual_seed(1)
    model, how = Bounded(), Lockstep(seconds=60)
    batches = [batch(), batch()]
    verdict = judge("", train_alone(model, batches, how), how.train(model, batches, PLANS[name]), 1e-10, "")
    assert verdict.verdict == "equal", verdict
    model.most.fill_(1e-3)
    with pytest.raises(ValueError, match="a large bias"):
        how.train(model, batches, PLANS[name])


def test_what_is_asked_of_inputs_and_of_activations_is_found_where_it_belongs() -> None:
    kinds = {end.__name__: captured(end)[1].program.graph.outputs for end in ENDS}
    counted = {name for name, leaves in kinds.items() if OutputLeaf("check_1", OutputKind.COUNT) in leaves}
    assert counted == {"labels"}


@pytest.mark.parametrize("end", [labels, activations], ids=lambda end: end.__name__)
@pytest.mark.parametrize("name", [name for name in PLANS if name != "one device"])
def test_training_goes_on_after_a_batch_that_failed_on_all_ranks(name: str, end: End) -> None:
    model, execution = captured(end)
    good, bad = [batch(), batch()], batch(fails=True)
    how = Lockstep()

    def trained(table: GroupTable) -> tuple[list[float], int, int]:
        own, plans = how.copied(model), (PLANS[name],)
        layouts = check_plans_and_choose_homes(plans, own, execution, None, table)
        settings = Settings(shared=True, outputs="auto", seed=0)
        runtime = make_runtime(own, None, table, execution, plans, layouts, settings)
        losses, errors = [], 0
        for given in (good[0], bad, good[1]):
            try:
                loss = runtime.run((), given)
            except ForwardCheckError:
                errors += 1
                continue
            loss.backward()
            losses.append(float(loss.detach()))
        return losses, errors, int(own.steps)

    found = run_in_threads(1 + max(PLANS[name].devices), trained)
    assert [(len(losses), errors, steps) for losses, errors, steps in found] == [(2, 1, 2)] * len(found)
    own = how.copied(model)
    alone = [float(own(**given).detach()) for given in good]
    for losses, _, _ in found:
        assert losses == pytest.approx(alone, rel=1e-12)
