"""A parameter that a step does not use has no gradient, as on one device: weight decay and momentum pass it over."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Plan
from tests.end_to_end.leaves.kinds import WIDTH, Experts, Model
from tests.end_to_end.leaves.test_leaves import PLANS

ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.3)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Halves(nn.Module):
    """Uses one layer for positive rows' sums and another for negative ones; a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, h: Tensor, sign: Tensor) -> Tensor:
        return self.up(h) if float(sign.sum()) > 0 else self.down(h)


class Deaf(nn.Module):
    """Does not look at what it is given, for some values."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH))

    def forward(self, h: Tensor, sign: Tensor) -> Tensor:
        return h * self.own if float(sign.sum()) > 0 else self.own.expand(h.shape[0], WIDTH) * 2


class Pair(nn.Module):
    """Returns what two layers make, of which nobody reads the second."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.unread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
        return self.read(h) * float(sign.sum() > 0), self.unread(h)


class ReadsFirst(nn.Module):
    """Returns the first of what a part returns."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = hetu_fx.leaf(Pair())

    def forward(self, h: Tensor, sign: Tensor) -> Tensor:
        first, _ = self.pair(h, sign)
        return first + h


class Switched(nn.Module):
    """Gives a part in its middle the inputs as well."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.part = part if isinstance(part, ReadsFirst) else hetu_fx.leaf(part)
        self.aside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, sign: Tensor) -> Tensor:
        h = self.part(torch.tanh(self.body(x)), sign) + self.aside(x).detach()
        return nn.functional.cross_entropy(self.head(h), y)


def batch_of(sign: float, rows: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(rows, WIDTH, dtype=torch.float64)
    return {"x": x, "y": torch.arange(rows) % 3, "sign": torch.full((rows,), sign, dtype=torch.float64)}


def trains_as_alone(model: nn.Module, plan: Plan, batches: list[dict[str, Tensor]]) -> None:
    captured = Lockstep().capture(model, batches[0])
    for make in (ADAMW, MOMENTUM):
        how = Lockstep(make)
        alone, found = train_alone(model, batches, how), how.train(model, batches, plan, captured)
        for step, own in zip(found.steps, alone.steps, strict=True):
            assert step.loss == pytest.approx(own.loss, rel=1e-9)
            assert step.gradients.keys() == own.gradients.keys()
        for name, value in alone.state.items():
            torch.testing.assert_close(found.state[name], value, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("part", [Halves, Deaf, ReadsFirst])
def test_what_a_leaf_does_not_use_in_a_step_has_no_gradient_of_it(part: type[nn.Module], plan: str) -> None:
    torch.manual_seed(0)
    trains_as_alone(Switched(part()).double(), PLANS[plan], [batch_of(sign) for sign in (1, -1, 1)])


@pytest.mark.parametrize("plan", PLANS)
def test_an_expert_without_rows_is_passed_over(plan: str) -> None:
    torch.manual_seed(0)
    model = Model(middle=hetu_fx.leaf(Experts())).double()
    with torch.no_grad():
        model.middle.gate.bias.copy_(torch.tensor([3.0, 0.0, -9.0]))  # type: ignore[union-attr]
    batches = [{name: batch_of(1, rows)[name] for name in ("x", "y")} for rows in (8, 6, 8)]
    trains_as_alone(model, PLANS[plan], batches)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_one_device_does_as_plain_pytorch_compiled_or_not(backend: str | None) -> None:
    torch.manual_seed(0)
    models = [Switched(Halves()).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, own = models
    optimizers = [ADAMW(model.parameters()) for model in models]
    plan = Plan.data_parallel((0,))
    hetu_fx.auto_parallelize(own, batch_of(1), plan=plan, optimizer=optimizers[1], compile=backend, check=False)
    for sign in (1, -1, -1, 1):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(**batch_of(sign)).backward()
            optimizer.step()
        nones = [[parameter.grad is None for parameter in model.parameters()] for model in models]
        assert nones[0] == nones[1]
    for (name, value), expected in zip(own.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(torch.as_tensor(value), expected, msg=name)


def test_gradients_that_are_kept_back_have_what_any_step_has_used() -> None:
    torch.manual_seed(0)
    models = [Switched(Halves()).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, own = models
    hetu_fx.auto_parallelize(own, batch_of(1), plan=Plan.data_parallel((0,)), compile="aot_eager", check=False)
    with own.no_sync():  # type: ignore[operator]
        own(**batch_of(1)).backward()
    own(**batch_of(-1)).backward()
    for sign in (1, -1):
        plain(**batch_of(sign)).backward()
    for (name, value), expected in zip(own.named_parameters(), plain.parameters(), strict=True):
        assert (value.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(torch.as_tensor(value.grad), expected.grad, msg=name)
