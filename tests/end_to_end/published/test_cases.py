"""Published gradient errors do not happen here: each case comes out as on one device, by `hetu-fx verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hetu_fx.cli.compare import in_double
from hetu_fx.cli.main import main
from hetu_fx.lockstep import Lockstep, train_alone
from tests.end_to_end.published import cases

FILE = Path(cases.__file__)
GRADIENTS, LOSS = 1e-9, 1e-10


def test_every_case_has_a_plan() -> None:
    assert {*cases.PUBLISHED.values(), *cases.ALIKE} == set(cases.PLANS)


@pytest.mark.parametrize("name", cases.PLANS)
def test_a_case_is_that_of_one_device(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = cases.PLANS[name]
    for number, plan in enumerate(plans):
        plan.write(tmp_path / f"{number}.json")
    given = [f"--plan={tmp_path / f'{number}.json'}" for number in range(len(plans))]
    ranks = 1 + max(max(plan.devices) for plan in plans)
    status = main(["verify", f"{FILE}:{name}", *given, f"--ranks={ranks}", "--steps=2", "--lr=0.1", "--json"])
    verdicts = json.loads(capsys.readouterr().out)
    assert {verdict["verdict"]: verdict["says"] for verdict in verdicts} == {"equal": ""}
    assert status == 0
    steps = [step for verdict in verdicts for step in verdict["steps"]]
    assert max(step["loss_difference"] for step in steps) < LOSS
    assert max(step["gradient_difference"] for step in steps) < GRADIENTS


class Clipped(torch.optim.SGD):
    """Clips gradients by the norm of all of them, and steps."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 0.05)
        super().step(closure)


@pytest.mark.parametrize("name", ["learned_sinks_of_split_heads", "padded_tokens_of_experts_beside_tensor_parallel"])
def test_the_norm_of_all_gradients_is_that_of_one_device(name: str) -> None:
    torch.manual_seed(0)
    model, batch = in_double(*getattr(cases, name)(), "cpu")
    how = Lockstep(lambda parameters: Clipped(parameters, lr=1.0), ranks=2)
    alone, made = train_alone(model, [batch] * 2, how), how.train(model, [batch] * 2, cases.PLANS[name][0])
    for parameter, value in alone.state.items():
        torch.testing.assert_close(made.state[parameter], value, rtol=1e-9, atol=1e-10)
