"""What pytest is told in pyproject.toml does what it is there for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_test_that_would_be_run_with_nothing_fails(tmp_path: Path) -> None:
    lines = ["import pytest", "@pytest.mark.parametrize('x', [])", "def test_nothing(x): pass"]
    (tmp_path / "test_it.py").write_text("\n".join(lines))
    settings = Path(__file__).parents[1] / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "Empty parameter set" in done.stdout
