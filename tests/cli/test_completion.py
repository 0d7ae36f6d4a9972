"""Shells complete all commands and their options."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from hetu_fx.cli.main import COMMANDS, SHELLS, main


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_all_commands_and_no_hidden_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert ("--nproc" in script) or ("-l nproc" in script)
    assert "--to" not in script.split()


def test_without_shtab_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'hetu-fx[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["hetu-fx", "doc"], "doctor"), (["hetu-fx", "plan", "--clu"], "--cluster"),
     (["hetu-fx", "completion", "fi"], "fish")],
)  # fmt: skip
def test_bash_completes(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    assert main(["completion", "bash"]) == 0
    line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_hetu_fx; echo ${{COMPREPLY[@]}}"
    done = subprocess.run([bash, "-c", capsys.readouterr().out + line], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
