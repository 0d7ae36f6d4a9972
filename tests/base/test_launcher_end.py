"""A process ends with what has started it, also if it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hetu_fx.base import launcher_end

CHILD = """
import os, signal
from hetu_fx.base.launcher_end import end_with_parent
end_with_parent(os.getppid())
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes of their parent's end")
def test_a_stopped_process_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        assert parent.stdout.read() == b""  # which returns once the child's end of the pipe is closed, too


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_a_process_whose_parent_has_gone_before_ends_at_once() -> None:
    program = "import os; from hetu_fx.base.launcher_end import end_with_parent; end_with_parent(os.getppid() + 1)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("run_id", [None, "none"])
def test_only_what_torchrun_has_started_ends_with_it(run_id: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(launcher_end, "end_with_parent", ended.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    launcher_end.end_with_torchrun()
    assert ended == ([] if run_id is None else [os.getppid()])
