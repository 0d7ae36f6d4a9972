"""Planning from files needs no torch: it is not imported, and where it is not installed a plan is made all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pkgutil import walk_packages

import pytest

from hetu_fx.planner import price, search, simulate, values
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from tests.planner.examples import paper, transformer

GRAPHS = {f"hetu_fx.planner.search.hap.{name}" for name in ("adapter", "executed", "priced", "to_program")}
MODULES = sorted(
    found.name
    for package in (price, search, simulate, values)
    for found in walk_packages(package.__path__, f"{package.__name__}.")
    if found.name not in GRAPHS
)
BLOCKED = "import sys; sys.modules['torch'] = None; "


def without_torch(code: str, folder: Path) -> None:
    """Run code in a process that cannot import torch; fail with what it says."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + code], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_search_needs_no_torch_and_no_solver_before_it_solves(tmp_path: Path) -> None:
    assert len(MODULES) > 40
    imports = f"import importlib; [importlib.import_module(name) for name in {MODULES}]"
    without_torch(f"{imports}; assert 'scipy' in sys.modules and 'scipy.optimize' not in sys.modules", tmp_path)


@pytest.mark.parametrize("search_name", ["auto", "homogeneous"])
def test_a_plan_is_made_and_simulated_from_files_without_torch(search_name: str, tmp_path: Path) -> None:
    Profile(transformer(rows=4)).write(tmp_path / "profile.json")
    paper(4, 2).write(tmp_path / "cluster.json")
    files = ["--cluster=cluster.json", "--profile=profile.json"]
    made = ["plan", *files, f"--search={search_name}", "--no-cache", "--out=plan.json"]
    without_torch(f"from hetu_fx.cli.main import main; sys.exit(main({made}))", tmp_path)
    assert Plan.read(tmp_path / "plan.json").predicted is not None
    simulated = ["simulate", "--plan=plan.json", *files, "--picture=step.html"]
    without_torch(f"from hetu_fx.cli.main import main; sys.exit(main({simulated}))", tmp_path)
