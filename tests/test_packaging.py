"""The package list of pyproject.toml is complete, nothing else is installed, and what pytest is told there holds."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from hetu_fx.base.frameworks import NEWEST

ROOT = Path(__file__).parents[1]
BESIDE = {"hetu_fx_align", "hetu_fx_emulate"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"] | {name: name for name in BESIDE}


def packages_in(folder: Path, name: str) -> set[str]:
    """Name every package under `folder`; the analysers' links are not folders of their own."""
    children = [child for child in folder.iterdir() if child.is_dir() and not child.is_symlink()]
    found = {name} if (folder / "__init__.py").is_file() else set()
    return found.union(*(packages_in(child, f"{name}.{child.name}") for child in children))


def test_every_package_on_disk_is_in_the_list() -> None:
    found = set[str]().union(*(packages_in(ROOT / folder, name) for name, folder in FOLDERS.items()))
    assert sorted(found) == sorted(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_with_code_is_a_package(package: str) -> None:
    mapped = max((name for name in FOLDERS if f"{package}.".startswith(f"{name}.")), key=len)
    folder = ROOT / FOLDERS[mapped] / package[len(mapped) :].strip(".").replace(".", "/")
    code = {path.parent for path in folder.rglob("*.py")}
    bare = code - {path.parent for path in folder.rglob("__init__.py")}
    assert not [path for path in bare if not any(part.is_symlink() for part in path.parents)]


def test_only_our_packages_are_installed() -> None:
    assert {package.split(".")[0] for package in PACKAGES} == {"hetu_fx", *BESIDE}


def test_tests_are_no_package() -> None:
    # With __init__.py files and the root on the path, a module of theirs could be loaded twice.
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_link_of_the_makefile_is_a_mapped_folder_that_git_ignores() -> None:
    makefile = (ROOT / "Makefile").read_text()
    line = next(line for line in makefile.splitlines() if line.startswith("LINKED := "))
    linked = line.removeprefix("LINKED := ").split()
    assert sorted(linked) == sorted(set(FOLDERS.values()) - {"hetu_fx", *BESIDE})
    assert {f"/hetu_fx/{name}" for name in linked} <= set((ROOT / ".gitignore").read_text().split())


def test_torch_has_no_upper_bound_but_in_make_whose_lower_one_is_the_declared_one() -> None:
    declared = next(line for line in PROJECT["project"]["dependencies"] if line.startswith("torch"))
    assert re.fullmatch(r"torch>=[\d.]+", declared)
    assert re.search(rf"^TORCH \?= {declared},<[\d.]+$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_oldest_and_the_newest_torch_are_those_that_ci_and_the_page_name() -> None:
    declared = next(line for line in PROJECT["project"]["dependencies"] if line.startswith("torch"))
    oldest, script = declared.removeprefix("torch>="), (ROOT / "Makefile").read_text()
    assert f"TORCH='torch=={oldest}.*'" in script
    assert f"TORCH='torch>={NEWEST['torch']}'" in script
    assert f"| torch | {oldest} | {NEWEST['torch']} |" in (ROOT / "docs" / "compatibility.md").read_text()


def test_the_version_is_that_of_the_tag_and_has_a_fallback() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["tool"]["setuptools_scm"]["fallback_version"])


def test_what_builds_the_site_is_pinned_and_what_ended_is_gone() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert all("==" in requirement for requirement in extras["docs"])
    assert not {"mkdocs-material", "evaluate"} & {re.split(r"\W", one)[0] for group in extras.values() for one in group}


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[a-z]*.yml")), ids=lambda p: p.stem)
def test_issue_forms_ask_for_what_doctor_says(form: Path) -> None:
    asked = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert asked == {"blank_issues_enabled": False}
        return
    needed = {field["attributes"]["label"] for field in asked["body"] if field.get("validations", {}).get("required")}
    assert "hetu-fx doctor --json" in needed
    assert len({field["id"] for field in asked["body"] if field["type"] != "markdown"}) >= len(needed)


def test_the_workflow_runs_what_ci_runs() -> None:
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert "bash .ci/run" in [step.get("run") for step in job["steps"]]


def test_the_citation_names_the_licence_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


@pytest.mark.parametrize("package", ["hetu_fx", *sorted(BESIDE)])
def test_the_typing_marker_is_shipped(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert PROJECT["tool"]["setuptools"]["package-data"][package] == ["py.typed"]


def test_a_test_that_would_be_run_with_nothing_fails(tmp_path: Path) -> None:
    lines = ["import pytest", "@pytest.mark.parametrize('x', [])", "def test_nothing(x): pass"]
    (tmp_path / "test_it.py").write_text("\n".join(lines))
    settings = ROOT / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "Empty parameter set" in done.stdout
