"""A buffer that a forward assigns anew is updated, as one that it writes to is; what cannot be written is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.errors import CaptureError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage

HOW = Lockstep()
PLANS = (
    Plan.single(0),
    Plan.data_parallel((0, 1), (3, 1)),
    Plan((Pipeline((Stage((0,)),)), Pipeline((Stage((1,)),), micro_batches=2))),
)


class Inner(nn.Module):
    """Keeps a running mean, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.out = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean() * self.steps
        self.mean = self.mean.clamp(max=3.0)
        return self.out(x) * (1 + self.mean)


class Model(nn.Module):
    """Has what assigns somewhere inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def batches() -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(rows, 4, dtype=torch.float64)} for rows in (6, 5, 7)]


@pytest.mark.parametrize("plan", PLANS, ids=["one device", "replicas", "micro-batches"])
def test_buffers_that_are_assigned_are_those_of_one_device_after_some_steps(plan: Plan) -> None:
    torch.manual_seed(0)
    model, given = Model().double(), batches()
    verdict = judge("", train_alone(model, given, HOW), HOW.train(model, given, plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict
    assert int(model.inner.steps) == 0  # as it was before copies were trained


class Shared(Model):
    """Has a module by two names, and calls it by both."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.inner

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.again(2 * x).mean()


def test_buffers_of_a_module_with_two_names_are_those_of_one_device() -> None:
    torch.manual_seed(0)
    model, given = Shared().double(), batches()
    verdict = judge("", train_alone(model, given, HOW), HOW.train(model, given, PLANS[1]), 1e-10, "")
    assert verdict.verdict == "equal", verdict


class Grown(Model):
    """Makes a buffer larger in every step."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        self.inner.mean = torch.stack([self.inner.mean, self.inner.mean])
        return loss


class Lazy(Model):
    """Makes a buffer of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.mean(0)
        return super().forward(x - self.first)


class Registered(Model):
    """Registers a buffer when it is called."""

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("last", x.mean(0))
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Grown, r"buffer 'mean' of module 'inner': a tensor of shape \[\] -> a tensor of shape \[2\]"),
        (Lazy, r"buffer 'first' of the model: None -> a tensor of shape \[4\]"),
        (Registered, r"buffer 'last' of the model: none -> a tensor of shape \[4\]"),
    ],
)
def test_what_cannot_be_written_to_the_buffer_that_stood_there_is_refused(kind: type[Model], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        HOW.capture(kind().double(), batches()[0])


def test_one_of_two_names_of_a_buffer_cannot_become_another() -> None:
    model = Model().double()
    model.register_buffer("same", model.inner.mean)
    with pytest.raises(CaptureError, match=r"assigns 'inner.mean', but \['same'\] stay what both were"):
        HOW.capture(model, batches()[0])


class Native(nn.Module):
    """Norms by an op whose schema does not say that it writes to its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight, self.bias = (
            nn.Linear(4, 6, bias=False),
            nn.Parameter(torch.ones(6)),
            nn.Parameter(torch.zeros(6)),
        )
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        given = self.first(x), self.weight, self.bias, self.mean, self.variance
        return torch.native_batch_norm(*given, True, 0.1, 1e-5)[0].tanh().square().mean()


@pytest.mark.parametrize("plan", [*PLANS[:2], Plan.tensor_parallel((0, 1))])
def test_buffers_that_an_op_writes_to_in_secret_are_those_of_one_device(plan: Plan) -> None:
    torch.manual_seed(0)
    model, given = Native().double(), batches()
    verdict = judge("", train_alone(model, given, HOW), HOW.train(model, given, plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict
