"""Two trainings lose alike if their losses differ by less than 1.5 % in the mean over 300 steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from hetu_fx.errors import AlignError
from hetu_fx.report.run_log import FORMAT
from hetu_fx_align.losses import LIMIT, STEPS, compare_losses, read_losses


def trained(dtype: torch.dtype, fault: float = 1.0) -> list[float]:
    """Train a small net for as many steps as are compared; `fault` is a factor of one layer's gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(64, 8)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.5 * torch.randn(64, 1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.02), []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
        loss.backward()
        model[0].weight.grad.mul_(fault)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_an_honest_dtype_is_alike_and_a_faulty_kind_is_not() -> None:
    reference = trained(torch.float32)
    honest = compare_losses(trained(torch.bfloat16), reference)
    assert honest.is_alike, honest
    faulty = compare_losses(trained(torch.float32, fault=-1.0), reference)
    assert not faulty.is_alike, faulty
    assert compare_losses(reference, reference).mean_relative_error == 0.0


def test_the_mean_is_of_relative_errors_and_the_worst_step_is_named() -> None:
    found = compare_losses([1.0, 2.2, 4.0], [1.0, 2.0, 4.0], steps=3)
    assert found.mean_relative_error == pytest.approx(0.1 / 3)
    assert (found.worst_step, found.worst_relative_error) == (2, pytest.approx(0.1))
    assert found.limit == LIMIT == 0.015


def test_a_loss_that_is_not_finite_is_not_alike() -> None:
    assert not compare_losses([1.0, math.nan], [1.0, 1.0], steps=2).is_alike


def test_too_few_losses_and_a_reference_without_losses_are_refused() -> None:
    with pytest.raises(AlignError, match="the training has 2 losses, but 300"):
        compare_losses([1.0, 1.0], [1.0] * 300)
    with pytest.raises(AlignError, match="loss of step 1 is 0"):
        compare_losses([1.0], [0.0], steps=1)


def test_losses_are_read_from_lists_and_from_logs(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1, 2.5]")
    assert read_losses(tmp_path / "list.json") == (1.0, 2.5)
    ran = {"step": 1, "variant": "a", "seconds": 1.0}
    entries = [
        {"event": "start", "format": FORMAT, "processes": 1, "variants": ["a"]},
        {"event": "step", "loss": 3.0, "predicted_seconds": None, **ran},
        {"event": "evaluation", "loss": 9.0, **ran},
    ]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, entries)))
    assert read_losses(tmp_path / "run.jsonl") == (3.0,)


@pytest.mark.parametrize(("text", "says"), [('{"a": 1}', "no list of losses"), ("[1, null]", "a loss is null")])
def test_what_is_no_list_of_numbers_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "losses.json").write_text(text)
    with pytest.raises(AlignError, match=says):
        read_losses(tmp_path / "losses.json")
    with pytest.raises(AlignError, match="there is no file"):
        read_losses(tmp_path / "other.json")
