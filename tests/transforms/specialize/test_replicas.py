"""What replicas of unlike sizes exchange in the middle of a model is right forward and backward, as all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage

UNLIKE = Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),))))
TENSOR = Plan.tensor_parallel((0, 1), (2, 1))


class Rows(nn.Module):
    """Layers, and an op in which rows meet."""

    def __init__(self, body: Callable[[Rows, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.body = body

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.first(x)).square().mean()


def met(x: Tensor) -> Tensor:
    return x + (x @ x.t()).softmax(-1) @ x


BODIES: dict[str, Callable[[Rows, Tensor], Tensor]] = {
    "split_layers_on_all_rows": lambda model, x: model.mlp(met(x)),
    "two_readers_of_all_rows": lambda model, x: met(x) * model.mlp(met(x)),
    "one_value_read_in_two_ways": lambda model, x: (lambda z: z + model.mlp(z))(met(x)),
    "parameters_of_rows_and_of_all_rows": lambda model, x: (lambda z: z + model.mlp(z))(met(x + model.mlp(x))),
}


@pytest.mark.parametrize("name", BODIES)
def test_gradients_through_what_replicas_sum_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(0)
    model, batches, how = Rows(BODIES[name]).double(), [(torch.randn(8, 6, dtype=torch.float64),)] * 2, Lockstep()
    verdict = judge(name, train_alone(model, batches, how), how.train(model, batches, UNLIKE), 1e-10, "")
    assert verdict.verdict == "equal", verdict


def test_a_bias_made_of_activations_is_added_once_and_all_devices_take_part_in_its_gradient() -> None:
    class Added(Rows):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return F.linear(F.gelu(self.up(h)), self.down.weight, h.mean(0)).square().mean()

    torch.manual_seed(0)
    model, batches, how = Added(met).double(), [(torch.randn(8, 6, dtype=torch.float64),)] * 2, Lockstep()
    del model.down.bias
    model.down.bias = None
    verdict = judge("bias", train_alone(model, batches, how), how.train(model, batches, TENSOR), 1e-10, "")
    assert verdict.verdict == "equal", verdict
