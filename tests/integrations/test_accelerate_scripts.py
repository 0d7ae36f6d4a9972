"""accelerate's own scripts hold with every model that they prepare made parallel, on equal and on unequal shares.

What they take from a hub is made here, see `oracles/hub.py`. Two parts do not apply: test_sync asserts that gradients
differ among processes inside `no_sync`, and they are whole there (docs/gradients.md); what test_distributed_data_loop
does by `join_uneven_inputs` acts on accelerators only, so that on CPUs it fails without hetu_fx too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spawned import free_port

ORACLES = Path(__file__).with_name("oracles")
SECONDS = 800
SHARES = ("1:1", "3:1")
SCRIPTS = (
    "script", "ops", "metrics", "checkpointing", "performance", "peak_memory_usage", "sync", "distributed_data_loop"
)  # fmt: skip

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the scripts in two processes with all shares; give the folder of what came of them, and what they said."""
    folder = tmp_path_factory.mktemp("scripts")
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1",
        "--main_process_port", free_port(), str(ORACLES / "accelerate_scripts.py"), ",".join(SHARES), str(folder),
        *SCRIPTS,
    ]  # fmt: skip
    env = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "log").open("w") as said:
        process = subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return folder


@pytest.mark.parametrize("shares", SHARES)
def test_the_scripts_of_accelerate_pass(shares: str, ran: Path) -> None:
    found = {path.stem: path.read_text() for path in sorted((ran / shares).glob("*.?.txt"))}
    expected = {f"{name}.{rank}": "passed" for name in SCRIPTS for rank in range(2)}
    assert found == expected, (ran / "log").read_text()[-2000:]
