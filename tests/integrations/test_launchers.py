"""The same script alone, under torchrun and under accelerate launch trains the same model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = str(Path(__file__).with_name("train_script.py"))
SECONDS = 150

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3 * SECONDS)]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch(folder: Path, *command: str, **environment: str) -> list[dict[str, Any]]:
    """Run a command in its own session, bounded, and return what each rank wrote."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    process = subprocess.Popen(
        command, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode == 0, output.decode()[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]


def torchrun(folder: Path, mode: str) -> list[dict[str, Any]]:
    module = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    return launch(folder, *module, SCRIPT, str(folder), mode)


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
    ranks = torchrun(tmp_path, "plain")
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
