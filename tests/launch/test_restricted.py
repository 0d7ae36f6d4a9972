"""Containers that allow little: no tracing, no cgroups, a home that cannot be written, little shared memory or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("restricted_script.py")
RESTRICTED = """
mount -t tmpfs -o {memory} tmpfs /dev/shm
mount -t tmpfs -o ro tmpfs {home}
mount -t tmpfs -o ro tmpfs /sys/fs/cgroup
exec setpriv --bounding-set -sys_ptrace --inh-caps -sys_ptrace "$@"
"""
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")),
    reason="only root may make namespaces",
)


@needs_namespaces
@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("memory", "told", "last_step"),
    [
        ("size=3m", "this snapshot is given up: cannot write a snapshot to /dev/shm", "None"),
        ("ro", "there is no /dev/shm to write to; snapshots are kept in", "3"),
    ],
    ids=["shared memory for parts and not for their copies", "no shared memory"],
)
def test_two_ranks_train_and_what_they_do_without_is_told_once(
    tmp_path: Path, memory: str, told: str, last_step: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path)]
    command = ["unshare", "--mount", "bash", "-ec", RESTRICTED.format(memory=memory, home=home), "bash", *launch]
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(tmp_path), "HETU_FX_JOB": "restricted"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    found = [(tmp_path / f"rank{rank}").read_text().split() for rank in range(2)]
    assert found[0][0] == found[1][0]
    assert [step for _, step in found] == [last_step] * 2
    assert 1 <= ended.stderr.count(told) <= 2  # by each rank that it befalls, once
