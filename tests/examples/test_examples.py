"""Every example runs as its page says, and two processes train what one trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.player import played
from tests.spawned import free_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
PLANNED_ALONE = {"plan_ahead"}  # needs no processes
SECONDS = 150
CALLS = r"hetu_fx\.(?:auto_parallelize|plan)\(|strategy=\"hetu_fx\""

by_name = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def losses(script: Path, world: int) -> list[tuple[float, float]]:
    """Return the first and the last loss that each process of a script printed."""
    ranks = played(script, world, free_port(), SECONDS)
    assert [well for well, _ in ranks] == [True] * world, ranks
    lines = [line for _, text in ranks for line in text.splitlines() if line.startswith("loss: ")]
    return [(float(first), float(last)) for line in lines for first, _, last in [line[6:].partition(" -> ")]]


@by_name
def test_an_example_is_short_and_has_one_line_of_hetu_fx(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) < 60
    assert text.count("# the one line") == len(re.findall(CALLS, text)) == 1


def test_the_page_lists_every_example_once() -> None:
    page = (FOLDER / "README.md").read_text()
    listed = re.findall(r"^\| \[(\w+\.py)\]\((\w+\.py)\) .*examples/(\w+\.py)` \|$", page, re.MULTILINE)
    assert sorted(listed) == [(script.name,) * 3 for script in SCRIPTS]


@pytest.mark.distributed
@by_name
def test_an_example_trains_in_two_processes_what_it_trains_alone(script: Path) -> None:
    if script.stem in PLANNED_ALONE:
        ((well, text),) = played(script, 1, free_port(), SECONDS)
        assert well, text
        assert "predicted step" in text
        return
    ((first, last),) = losses(script, 1)
    assert last < 0.9 * first
    for rank in losses(script, 2):
        assert rank == pytest.approx((first, last), rel=2e-3)


@pytest.mark.distributed
def test_the_command_of_the_page_starts_an_example() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*torchrun, str(FOLDER / "vision.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("loss: ") == 2
