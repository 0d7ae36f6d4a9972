"""`hetu-fx measure`: two files out, which `hetu-fx plan` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hetu_fx.planner.measure.block_times
from hetu_fx.cli.given import local_device
from hetu_fx.cli.main import main
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.values.profile_file import Profile
from tests.planner.measure.test_block_times import run_by_size

EXAMPLE = """
from tests.model_zoo import causal_batch, llama

def small():
    return llama(num_key_value_heads=2), causal_batch(4, 16)

number = 3
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hetu_fx.planner.measure.block_times, "time_shard", run_by_size)
    monkeypatch.setattr(hetu_fx.planner.measure.block_times, "_CELL_SECONDS", 0.0)
    Path("my_example.py").write_text(EXAMPLE)


def test_devices_and_blocks_are_measured_and_planned_from_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "my_example:small"]) == 0
    shown = capsys.readouterr()
    assert "FLOP/s" in shown.out
    assert "kept KB/token" in shown.out
    assert "x float32" in shown.out
    cluster = Cluster.read("cluster.json")
    assert [device.source for device in cluster.devices] == ["measured"]
    assert [(one.kind, one.dtype) for one in cluster.precisions] == [("cpu", "bfloat16"), ("cpu", "float16")]
    assert [time.source for time in Profile.read("profile.json").times] == ["measured", "measured"]
    assert main(["plan", "--cluster", "cluster.json", "--profile", "profile.json"]) == 0
    assert "predicted step" in capsys.readouterr().out


def test_both_files_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "my_example:small", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"]["format"] == "hetu_fx.cluster/1"
    assert told["profile"]["format"] == "hetu_fx.profile/1"


def test_without_a_model_only_the_devices_are_measured() -> None:
    assert main(["measure", "--cluster", "mine.json"]) == 0
    assert Cluster.read("mine.json").ranks == (0,)
    assert not Path("profile.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_example", "names no function\nhint: write it like MODULE:FUNCTION"),
        ("no_such_example:small", "No module named 'no_such_example'\nhint: start in the folder of the module"),
        ("my_example:large", "module my_example has no function large"),
        ("my_example:number", "module my_example has no function number"),
    ],
)
def test_a_model_that_is_not_there_is_refused(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", name]) == 2
    assert message in capsys.readouterr().err


def test_each_process_has_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (local_device("cuda"), local_device("cuda:1"), local_device("cpu")) == ("cuda:3", "cuda:1", "cpu")


def test_a_profile_of_a_model_in_a_script_is_written_or_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.line = torch.nn.Linear(4, 1)\n"
        "    def forward(self, x):\n"
        "        return self.line(x).square().mean()\n"
        "def make():\n"
        "    return Net(), {'x': torch.ones(8, 4)}\n"
        "def alone():\n"
        "    return Net()\n"
    )
    out = tmp_path / "profile.json"
    assert main(["profile", f"{script}:make", "--out", str(out)]) == 0
    assert "<Profile: 8 rows, 0 blocks, 20 bytes of parameters" in capsys.readouterr().out
    assert Profile.read(out).costs.rows == 8
    assert main(["profile", f"{script}:make", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == Profile.read(out).to_json()
    assert main(["profile", f"{script}:alone"]) == 2
    assert "return (model, example batch)" in capsys.readouterr().err
