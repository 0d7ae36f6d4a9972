"""The same script alone, under torchrun and under accelerate launch trains the same model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spawned import free_port, run

SCRIPT = str(Path(__file__).with_name("train_script.py"))
SECONDS = 150

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3 * SECONDS)]


def launch(folder: Path, *command: str, **environment: str) -> list[dict[str, Any]]:
    """Run a command, and return what each rank wrote."""
    status, output = run(*command, seconds=SECONDS, **environment)
    assert status == 0, output[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]


def torchrun(folder: Path, mode: str) -> list[str]:
    module = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    return [*module, SCRIPT, str(folder), mode]


def assert_same_training(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for made in ranks:
        assert made["class"] == "Net"
        assert made["norms"] == pytest.approx(alone["norms"], rel=1e-10)
        for name, whole in alone["parameters"].items():
            torch.testing.assert_close(
                torch.tensor(made["parameters"][name]), torch.tensor(whole), rtol=1e-8, atol=1e-10
            )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    (made,) = launch(folder, sys.executable, SCRIPT, str(folder), "plain")
    return made


def test_torchrun_trains_like_one_process(tmp_path: Path, alone: dict[str, Any]) -> None:
    ranks = launch(tmp_path, *torchrun(tmp_path, "plain"))
    assert [made["world"] for made in ranks] == [2, 2]
    assert all(made["losses"] == pytest.approx(alone["losses"], rel=1e-12) for made in ranks)
    assert_same_training(ranks, alone)


def test_accelerate_launch_trains_like_one_process(tmp_path: Path, alone: dict[str, Any]) -> None:
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    ranks = launch(
        tmp_path,
        *accelerate, "--num_machines", "1", "--main_process_port", free_port(), SCRIPT, str(tmp_path), "accelerate",
        ACCELERATE_USE_CPU="1",
    )  # fmt: skip
    assert [made["world"] for made in ranks] == [2, 2]
    assert_same_training(ranks, alone)


def test_accelerate_launch_with_a_config_file_trains_like_one_process(tmp_path: Path, alone: dict[str, Any]) -> None:
    settings = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2, "num_machines": 1,
        "machine_rank": 0, "mixed_precision": "no", "main_process_port": int(free_port()), "use_cpu": False,
    }  # fmt: skip
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    module = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    ranks = launch(tmp_path, *module, SCRIPT, str(tmp_path), "accelerate", ACCELERATE_USE_CPU="1")
    assert [made["world"] for made in ranks] == [2, 2]
    assert_same_training(ranks, alone)


def test_the_launcher_of_notebooks_trains_like_one_process(tmp_path: Path, alone: dict[str, Any]) -> None:
    code = (
        "import sys, pathlib; from accelerate import debug_launcher; sys.path.insert(0, sys.argv[1]); "
        "import train_script; debug_launcher(train_script.accelerated, (pathlib.Path(sys.argv[2]),), num_processes=2)"
    )
    ranks = launch(tmp_path, sys.executable, "-c", code, str(Path(SCRIPT).parent), str(tmp_path))
    assert [made["world"] for made in ranks] == [2, 2]
    assert_same_training(ranks, alone)


NOTEBOOK = """
import os, pathlib, sys
import torch
from accelerate import notebook_launcher
sys.path.insert(0, sys.argv[1])
import train_script
torch.randn(500, 500) @ torch.randn(500, 500)  # threads that a fork has not
with torch.no_grad():
    train_script.Net()(torch.randn(9, 6), torch.zeros(9, dtype=torch.long))
for name in sys.argv[4:]:
    folder = pathlib.Path(sys.argv[2]) / name
    folder.mkdir(exist_ok=True)
    notebook_launcher(getattr(train_script, name), args=(folder,), num_processes=2, use_port=sys.argv[3])
"""
FUNCTIONS = ("plain", "accelerated")


@pytest.fixture(scope="module")
def launched_from_a_notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of what a notebook has launched, one after another: one function and again, then another."""
    folder = tmp_path_factory.mktemp("notebook")
    arguments = (str(Path(SCRIPT).parent), str(folder), free_port(), FUNCTIONS[0], *FUNCTIONS)
    environment = {"OMP_NUM_THREADS": "2", "ACCELERATE_USE_CPU": "1"}
    status, said = run(sys.executable, "-c", NOTEBOOK, *arguments, seconds=2 * SECONDS, **environment)
    assert status == 0, said[-4000:]
    return folder


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_notebook_that_has_computed_launches_two_processes_that_train_like_one(
    launched_from_a_notebook: Path, alone: dict[str, Any], function: str
) -> None:
    ranks = [json.loads(path.read_text()) for path in sorted((launched_from_a_notebook / function).glob("rank_*.json"))]
    assert [made["world"] for made in ranks] == [2, 2]
    assert_same_training(ranks, alone)


def test_a_launch_of_one_process_where_two_were_asked_for_is_told(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    status, said = run(*module, SCRIPT, str(tmp_path), "accelerate", seconds=SECONDS)
    assert status == 0
    assert "hetu_fx runs on ONE process" in said
    assert "ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu" in said


def test_processes_of_which_each_is_the_only_one_for_accelerate_are_refused(tmp_path: Path) -> None:
    status, said = run(*torchrun(tmp_path, "accelerate"), seconds=SECONDS)
    assert status != 0
    assert "accelerate takes each of the 2 processes for the only one" in said
    assert "In a notebook, set os.environ['ACCELERATE_USE_CPU'] = '1' before notebook_launcher" in said
