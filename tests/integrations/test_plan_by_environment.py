"""HETU_FX_PLAN makes scripts of accelerate parallel that do not name hetu_fx; they train as without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import hetu_fx
from hetu_fx.base.patches import PLAN_VARIABLE, install_patches
from hetu_fx.errors import PlanError
from hetu_fx.integrations import unpatch
from tests.spawned import free_port, run

SCRIPT = str(Path(__file__).with_name("untouched_script.py"))
SECONDS = 200
TRAINER = "trainer" if find_spec("trl") is None else "sft"  # which is a Trainer, too
X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.layer(x)
        return {"loss": made.square().mean(), "made": made}


@pytest.fixture
def by_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[hetu_fx.Plan]:
    """Name a plan file as a launch would, and give the plan."""
    plan = hetu_fx.Plan.data_parallel([0])
    plan.write(tmp_path / "plan.json")
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
    AcceleratorState._reset_state(True)
    import_module("hetu_fx.integrations.accelerate")  # as it is with accelerate, where the variable is set
    install_patches("accelerate")
    yield plan
    AcceleratorState._reset_state(True)
    unpatch()


def test_what_prepare_takes_to_train_becomes_parallel_by_the_plan_file_at_its_first_call(
    by_environment: hetu_fx.Plan,
) -> None:
    model, frozen = Net(), Net().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared: Any
    prepared, frozen, wrapped = Accelerator(cpu=True).prepare(model, frozen, optimizer)
    assert prepared is model
    plain = Net()
    for _ in range(2):
        loss, wanted = prepared(X)["loss"], plain(X)["loss"]
        assert loss.item() == wanted.item()
        loss.backward()
        wanted.backward()
        wrapped.step()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        wrapped.zero_grad()
        plain.zero_grad()
    assert prepared.hetu.plan.to_json()["pipelines"] == by_environment.to_json()["pipelines"]
    assert not hasattr(frozen, "hetu"), "there is nothing to train in it"


def test_the_accelerators_precision_is_the_models(by_environment: hetu_fx.Plan) -> None:
    prepared: Any = Accelerator(cpu=True, mixed_precision="bf16").prepare(Net())
    made = prepared(X)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = Net()(X)["loss"]
    assert prepared.hetu.plan == replace(by_environment, name=prepared.hetu.plan.name)
    assert made.dtype == torch.float32
    assert made.item() == wanted.float().item()


def test_a_script_that_names_no_plan_has_that_of_the_environment(by_environment: hetu_fx.Plan) -> None:
    model: Any = hetu_fx.auto_parallelize(Net(), (X,))
    assert model.hetu.plan.to_json()["pipelines"] == by_environment.to_json()["pipelines"]
    own: Any = hetu_fx.auto_parallelize(Net(), (X,), plan=replace(hetu_fx.Plan.single(), name="own"))
    assert own.hetu.plan.name == "own"


def test_a_plan_file_that_there_is_not_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(PlanError, match=r"there is no plan file 'none\.json'"):
        hetu_fx.auto_parallelize(Net(), (X,))


def trained(folder: Path, *command: str, **environment: str) -> list[dict[str, Any]]:
    """Run a command; return what each rank wrote."""
    folder.mkdir()
    status, output = run(*command, seconds=SECONDS, **environment)
    assert status == 0, output[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]


@pytest.mark.distributed
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("kind", ["accelerate", TRAINER])
def test_accelerate_launch_trains_an_untouched_script_by_a_plan_file_as_one_process_does(
    tmp_path: Path, kind: str
) -> None:
    file, plan = tmp_path / "plan.json", hetu_fx.Plan.data_parallel((0, 1), (3, 1))
    plan.write(file)
    alone, folder = tmp_path / "alone", tmp_path / "launched"
    (wanted,) = trained(alone, sys.executable, SCRIPT, str(alone), kind)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--main_process_port", free_port(), "-m", "hetu_fx"]
    environment = {"ACCELERATE_USE_CPU": "1", PLAN_VARIABLE: str(file)}
    ranks = trained(folder, *launch, SCRIPT, str(folder), kind, **environment)
    assert wanted["plan"] is None
    assert [made["plan"]["pipelines"] for made in ranks] == [plan.to_json()["pipelines"]] * 2
    for made in ranks:
        assert made["losses"][: len(wanted["losses"])] == pytest.approx(wanted["losses"], rel=1e-4)


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS)
def test_a_script_that_does_not_use_accelerate_is_told_that_nothing_ran_in_parallel(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('arguments', sys.argv[1:])")
    command = [sys.executable, "-m", "hetu_fx", str(script), "--one"]
    status, output = run(*command, seconds=SECONDS, **{PLAN_VARIABLE: "data"})
    assert status == 0, output
    assert "arguments ['--one']" in output
    assert "has not used accelerate" in output
    status, output = run(*command, seconds=SECONDS)
    assert (status, "usage: HETU_FX_PLAN=plan.json python -m hetu_fx SCRIPT" in output) == (1, True)
