"""The command line: thin, quick to start, and errors without a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetu_fx.checkpoint import snapshot_folders
from hetu_fx.checkpoint.snapshot_folders import job_folder
from hetu_fx.cli.main import COMMANDS, main, make_parser
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.passes import PASSES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that a job has left."""
    monkeypatch.setattr(snapshot_folders, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(snapshot_folders, "_held", {})
    left = job_folder().with_name("run-llama")
    left.mkdir()
    (left / "part").write_bytes(bytes(1000))
    return left


def states(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {row["folder"]: row["state"] for row in json.loads(capsys.readouterr().out)}


def test_what_is_stale_is_listed_and_removed_on_demand_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "--json"]) == 0
    assert states(capsys) == {str(folder): "recent"}
    assert main(["clean", "--idle", "0"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("stale          1 kB")
    assert "hint: hetu-fx clean --yes" in shown
    assert folder.exists()
    assert main(["clean", "--idle=0", "--yes", "--json"]) == 0
    assert states(capsys) == {str(folder): "removed"}
    assert not folder.exists()
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == "no job has snapshots in this node's memory\n"


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        assert f"hetu-fx {name}" in capsys.readouterr().out


def test_help_imports_no_torch() -> None:
    program = "import sys; from hetu_fx.cli.main import make_parser; make_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


def test_an_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "--speeds", "fast", "--", "true"]) == 2
    assert capsys.readouterr().err == "hetu-fx: speed 'fast' is not a number\n"


def test_emulate_without_speeds_says_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "--", "true"]) == 2
    assert "--speeds 0.8,0.4,0.2,0.2" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["--dry-run", "--dry_run"])
def test_dashes_and_underscores_mean_the_same(capsys: pytest.CaptureFixture[str], spelling: str) -> None:
    arguments = ["emulate", "--speeds=0.2,0.1", "--limit=affinity", spelling, "--", "python", "--my_option"]
    assert main(arguments) == 0
    assert "python --my_option &" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["2", "two=0.1", "=0.1"])
def test_a_change_that_cannot_be_read_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["emulate", f"--set={text}"]) == 2
    assert "write it like --set 2=0.1" in capsys.readouterr().err


def test_a_change_needs_a_running_emulation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETU_FX_EMULATE_CONTROL", "/no/such/folder")
    assert main(["emulate", "--set", "0=0.1"]) == 2
    assert "no running emulation in /no/such/folder" in capsys.readouterr().err


def test_env_shows_versions_and_what_can_be_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    shown = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert shown["torch"].startswith("2.")
    assert {"python", "devices", "collectives", "emulated speeds", "emulated nodes"} <= shown.keys()


def test_a_plan_file_is_shown_and_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    Plan.single().write(one)
    Plan.data_parallel([0, 1], [3, 1]).write(two)
    assert main(["plan", str(two)]) == 0
    assert "1f1b" in capsys.readouterr().out
    assert main(["plan", str(two), "--against", str(one)]) == 0
    assert "pipelines[1]  -           1 row: [1]" in capsys.readouterr().out.splitlines()


def test_passes_are_listed_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")]
    assert shown == [graph_pass.name for graph_pass in PASSES]


def test_a_broken_plan_file_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "hetu_fx.plan/1", "pipeline": []}')
    assert main(["plan", str(tmp_path / "plan.json")]) == 2
    assert "unknown key 'pipeline' (did you mean 'pipelines'?)" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.timeout(60)
def test_the_status_of_the_command_is_ours() -> None:
    script = f"test $RANK = 0 || kill -{signal.SIGUSR1.value} $$"
    arguments = ["emulate", "--speeds", "0.2,0.1", "--", "sh", "-c", script]
    done = subprocess.run([sys.executable, "-m", "hetu_fx.cli", *arguments], check=False, env=os.environ)
    assert done.returncode == 128 + signal.SIGUSR1


@pytest.mark.parametrize(
    "arguments",
    [["env"], ["passes"], ["emulate", "--speeds=0.2,0.1", "--limit=affinity", "--dry-run", "true"]],
    ids=lambda words: words[0],
)
def test_commands_that_tell_something_tell_it_as_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    command = [*arguments[:-1], "--json", "--", "true"] if len(arguments) > 1 else [*arguments, "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)


WITHOUT_JSON = {
    "launch": "what it prints is the script's; --events writes lines of JSON",
    "completion": "prints a script for a shell",
    "report": "writes a page; `log` has the same as JSON",
}


def test_every_command_that_says_something_has_json() -> None:
    (commands,) = (action.choices for action in make_parser()._actions if isinstance(action.choices, dict))
    with_json = {name for name, parser in commands.items() if "--json" in parser.format_help()}
    assert with_json | WITHOUT_JSON.keys() == COMMANDS.keys()


def test_whoever_reads_only_the_beginning_sees_no_traceback() -> None:
    told, given = os.pipe()
    os.close(told)  # as `| head` that has gone
    command = [sys.executable, "-m", "hetu_fx.cli", "passes"]
    found = subprocess.run(command, stdout=given, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(given)
    assert (found.returncode, found.stderr) == (128 + 13, "")
