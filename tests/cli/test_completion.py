"""Shells complete all commands and their options."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from hetu_fx.cli.completion import SHELLS, completion
from hetu_fx.cli.main import COMMANDS, main, make_parser
from hetu_fx.errors import EnvironmentProblem


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_all_commands_and_no_hidden_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert ("--nproc" in script) or ("-l nproc" in script)
    assert "--to" not in script.split()


def test_another_shell_is_refused() -> None:
    with pytest.raises(EnvironmentProblem, match="no completion for 'csh'"):
        completion(make_parser(), "csh")


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["hetu-fx", "doc"], "doctor"), (["hetu-fx", "plan", "--clu"], "--cluster"),
     (["hetu-fx", "completion", "fi"], "fish")],
)  # fmt: skip
def test_bash_completes(words: list[str], expected: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _hetu_fx; echo ${{COMPREPLY[@]}}"
    script = completion(make_parser(), "bash") + line
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
