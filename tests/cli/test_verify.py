"""`hetu-fx verify` finds plans equal, differing or refused, and says so by its table, its JSON and its status."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hetu_fx.check.verdict import judge, worst
from hetu_fx.cli.compare import draws_random_numbers
from hetu_fx.cli.given import load_function
from hetu_fx.cli.main import main
from hetu_fx.cli.verify import as_text, read_plan_name
from hetu_fx.comm_ops.wire import collectives
from hetu_fx.errors import PlanError, ProfileError
from hetu_fx.lockstep import Step, Trained, find_loss
from hetu_fx.plans.plan import Pipeline, Plan, Stage

SCRIPT = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, y):
        return {"loss": nn.functional.mse_loss(self.down(self.drop(torch.relu(self.norm(self.up(x))))), y)}


def made():
    return Net(), {"x": torch.randn(8, 6), "y": torch.randn(8, 2)}


def without_dropout():
    model, batch = made()
    model.drop = nn.Identity()
    return model, batch
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "my_net.py").write_text(SCRIPT)
    return tmp_path / "my_net.py"


def trained(loss: float = 1.0, gradient: float = 1.0) -> Trained:
    return Trained([Step(loss, {"w": torch.tensor([gradient, 0.0])})], {"w": torch.ones(2)})


def test_equal_trainings_are_equal_and_others_differ_by_name() -> None:
    assert judge("p", trained(), trained(), 1e-6, "").verdict == "equal"
    assert judge("p", trained(), trained(loss=1.1), 1e-6, "").verdict == "differs"
    found = judge("p", trained(), trained(gradient=1.5), 1e-6, "")
    assert found.verdict == "differs"
    assert (found.steps[0].worst_gradient, found.steps[0].gradient_difference) == ("w", 0.5)


def test_tensors_that_are_zero_but_for_rounding_do_not_differ() -> None:
    alone = {"big": torch.ones(4), "zero": torch.full((4,), 1e-18)}
    assert worst(alone, {"big": torch.ones(4), "zero": torch.full((4,), -1e-18)})[1] < 1e-10
    assert worst(alone, {"zero": torch.zeros(4)}) == ("big", 1.0)


def test_a_tensor_without_numbers_differs_wherever_it_stands() -> None:
    alone = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    assert worst(alone, {**alone, "b": torch.tensor([1.0, math.nan])}) == ("b", math.inf)
    lost = Trained([Step(1.0, alone)], {**alone, "b": torch.full((2,), math.nan)})
    assert judge("p", Trained([Step(1.0, alone)], alone), lost, 1e-6, "").verdict == "differs"


def test_the_table_has_a_row_per_step_and_a_judgement_per_plan() -> None:
    text = as_text([judge("data", trained(), trained(), 1e-6, "").to_json()])
    assert "loss on one device" in text
    assert text.splitlines()[-1].startswith("data: equal; parameters and buffers after the steps: w 0.0e+00")


def test_plans_are_made_by_name_and_files_are_read(tmp_path: Path) -> None:
    data, tensor = read_plan_name("data", 2), read_plan_name("tensor", 2)
    assert isinstance(data, Plan)
    assert isinstance(tensor, Plan)
    assert [pipeline.share for pipeline in data.pipelines] == [3, 1]
    assert tensor.devices == (0, 1)
    tensor.write(tmp_path / "plan.json")
    assert read_plan_name(str(tmp_path / "plan.json"), 2) == tensor
    with pytest.raises(PlanError, match="there is no plan file 'dta'"):
        read_plan_name("dta", 2)


def test_losses_are_found_as_models_return_them() -> None:
    loss = torch.tensor(1.0)
    assert find_loss(loss) is find_loss({"loss": loss}) is find_loss((loss, torch.ones(2))) is loss
    with pytest.raises(ProfileError, match="returns no loss"):
        find_loss(torch.ones(2))


def test_a_function_is_found_in_a_script(script: Path) -> None:
    model, batch = load_function(f"{script}:made")()
    assert isinstance(model, nn.Module)
    assert draws_random_numbers(model, batch)
    assert not draws_random_numbers(*load_function(f"{script}:without_dropout")())
    with pytest.raises(ProfileError, match="there is no file"):
        load_function(f"{script.parent}/other.py:made")


@pytest.mark.parametrize("function", ["nothing", "my_net.py:nothing"])
def test_a_function_that_is_not_there_is_refused_before_anything_starts(
    script: Path, function: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(script.parent)
    assert main(["verify", function]) == 2
    assert "function" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_plans_train_what_one_device_trains(script: Path) -> None:
    command = [sys.executable, "-m", "hetu_fx.cli", "verify", f"{script}:made", "--steps=2", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert [(verdict["plan"], verdict["verdict"]) for verdict in told] == [("data", "equal"), ("tensor", "equal")]
    assert all("random" in verdict["says"] for verdict in told)
    assert all(step["gradient_difference"] < 1e-10 for verdict in told for step in verdict["steps"])


@pytest.mark.parametrize("function", ["without_dropout", "made"])
def test_all_ranks_of_plans_train_in_this_process_what_one_device_trains(
    script: Path, function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(tuple(Pipeline((Stage((rank, rank + 1), (2, 1)),)) for rank in range(0, 12, 2)))
    plan.write(script.parent / "plan.json")
    plans = ("data", "tensor", str(script.parent / "plan.json"))
    given = [f"--plan={plan}" for plan in plans]
    assert main(["verify", f"{script}:{function}", "--ranks=12", "--steps=2", "--json", *given]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(verdict["plan"], verdict["verdict"]) for verdict in told] == [(plan, "equal") for plan in plans]
    assert all(("random" in verdict["says"]) == (function == "made") for verdict in told)
    assert all(step["gradient_difference"] < 1e-10 for verdict in told for step in verdict["steps"])


TIME_FIRST = """
import torch
from torch import nn


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x, mask):
        return {"loss": self.attention(x, x, x, attn_mask=mask)[0].pow(2).mean()}


def made():
    return Attends(), {"x": torch.randn(5, 5, 8), "mask": torch.zeros(5, 5)}
"""


def test_rows_are_the_dims_that_the_command_line_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "time_first.py"
    script.write_text(TIME_FIRST)
    asked = ["verify", f"{script}:made", "--ranks=2", "--steps=1", "--plan=data", "--json"]
    assert main([*asked, "--row-dim=x=1", "--row-dim=mask=none"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["verdict"] == "equal"
    assert main([*asked, "--row-dim=x"]) == 2
    assert "write it like --row-dim x=1" in capsys.readouterr().err


def test_a_wrong_sum_differs_and_copies_that_differ_are_told(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sum_twice(result: torch.Tensor, summands: list[torch.Tensor]) -> None:
        result.copy_(sum(summands[1:], 2 * summands[0]))

    monkeypatch.setattr(collectives, "sum_in_order", sum_twice)
    assert main(["verify", f"{script}:without_dropout", "--ranks=3", "--steps=1", "--plan=tensor"]) == 1
    assert "tensor: differs" in capsys.readouterr().out


def test_ranks_that_cannot_be_and_plans_for_measured_devices_are_refused(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = f"{script}:without_dropout"
    assert main(["verify", named, "--ranks=0"]) == 2
    assert main(["verify", named, "--ranks=2", "--device=cuda"]) == 2
    assert "give 1 rank or more, all of them on the cpu" in capsys.readouterr().err
    assert main(["verify", named, "--ranks=2", "--plan=auto"]) == 1
    assert "auto: refused: 'auto' is made for processes, which are measured" in capsys.readouterr().out
