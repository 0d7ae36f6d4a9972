"""Every law has torch's moments, depends on its row alone, and gives no gradient to what it is shaped like."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.check.verdict import judge
from hetu_fx.errors import PlanError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import OutputKind
from hetu_fx.lockstep import Lockstep
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.transforms.rewrites.counter_rng import Randomness
from tests.graph.compare import run_on_one_device

Body = Callable[[Tensor], Tensor]
UNLIKE = Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),))))

LAWS: dict[str, Body] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randn": lambda x: torch.randn(x.shape[0], *x.shape[1:]),
    "complex randn": lambda x: torch.view_as_real(torch.randn(x.shape[0], *x.shape[1:], dtype=torch.complex128)),
    "randint": lambda x: torch.randint(2, 7, x.shape).to(x.dtype),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "normal of both": lambda x: torch.normal(x, x + 1),
    "normal of numbers": lambda x: torch.normal(1.0, 2.0, (x.shape[0], *x.shape[1:])),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.0, 0.25),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.4),
    "bernoulli of a tensor": lambda x: torch.empty_like(x).bernoulli_(torch.full((x.shape[-1],), 0.3)),
    "rrelu": lambda x: F.rrelu(x - 1, training=True),
    "multinomial": lambda x: torch.multinomial(torch.arange(x.shape[1]) + x + 1, 3).to(x.dtype),
    "multinomial with replacement": lambda x: torch.multinomial(torch.arange(x.shape[1]) + x + 1, 9, True).to(x.dtype),
}


class Drawn(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.scale = body, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale)


def drawn(name: str, x: Tensor, row: int = 0) -> Tensor:
    model = Drawn(LAWS[name]).double()
    graph = Randomness()(capture(model, (torch.zeros(7, *x.shape[1:], dtype=x.dtype),)))
    assert not graph.notes
    return run_on_one_device(graph, model, (x,), {"random_state": torch.tensor([7, 0, row])})[
        OutputKind.VALUE, "output"
    ]


@pytest.mark.parametrize("name", LAWS)
def test_laws_have_torchs_moments(name: str) -> None:
    x = torch.zeros(4000, 12, dtype=torch.float64)
    found, wanted = drawn(name, x), LAWS[name](x)
    assert found.shape == wanted.shape
    error = 6 * wanted.std() / x.shape[0] ** 0.5
    assert (found.mean(0) - wanted.mean(0)).abs().max() < error
    assert abs(found.std() - wanted.std()) < error


@pytest.mark.parametrize("name", LAWS)
def test_what_is_drawn_depends_on_the_row_alone(name: str) -> None:
    x = torch.zeros(5, 6, dtype=torch.float64)
    whole = drawn(name, x)
    assert torch.equal(torch.cat([drawn(name, x[:2]), drawn(name, x[2:], row=2)]), whole)


def test_permutations_hold_every_place_once() -> None:
    model = Drawn(lambda x: x[:, torch.randperm(x.shape[1])]).double()
    graph = Randomness()(capture(model, (torch.zeros(3, 50, dtype=torch.float64),)))
    x = torch.arange(50.0, dtype=torch.float64).expand(2, 50)
    made = run_on_one_device(graph, model, (x,), {"random_state": torch.tensor([7, 0, 0])})[OutputKind.VALUE, "output"]
    assert not torch.equal(made, x)
    assert torch.equal(made.sort(1).values, x)


class Autoencoder(nn.Module):
    """Draws its code as textbooks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.log_variance = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.decode = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x).relu()
        mean, deviation = self.mean(h), (self.log_variance(h) / 2).exp()
        code = mean + torch.randn_like(deviation) * deviation
        return F.mse_loss(self.decode(code), x) + (mean.square() + deviation.square() - 2 * deviation.log()).mean()


@pytest.mark.parametrize("plan", [Plan.data_parallel((0, 1), (3, 1)), UNLIKE], ids=["rows", "groups"])
def test_an_autoencoder_that_draws_its_code_trains_under_every_plan_alike(plan: Plan) -> None:
    torch.manual_seed(0)
    model, batches, how = Autoencoder().double(), [(torch.randn(8, 6, dtype=torch.float64),)] * 2, Lockstep()
    alone = how.train(model, batches, Plan.single(0))
    assert alone.steps[0].loss != alone.steps[1].loss
    assert judge("plan", alone, how.train(model, batches, plan), 1e-10, "").verdict == "equal"


def test_draws_that_no_law_is_known_of_are_refused_on_several_devices() -> None:
    model, batch = Drawn(lambda x: torch.poisson(x.exp()).mean()).double(), (torch.randn(8, 6, dtype=torch.float64),)
    with pytest.raises(PlanError, match=r"(?s)aten.poisson.* draws from torch's own generator.*hint: "):
        Lockstep().train(model, [batch], Plan.tensor_parallel((0, 1)))
