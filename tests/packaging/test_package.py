"""What is wrong with a wheel or an sdist is seen, and a torch that brings CUDA is known by what it needs."""

from __future__ import annotations

import io
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.environments import ROOT, Torch
from tests.packaging.package import IN_SDIST, files, wrong_in_sdist, wrong_in_wheel

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def wheel_of(names: set[str], folder: Path) -> Path:
    path = folder / "hetu_fx-1.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def whole() -> set[str]:
    modules = {f"{package.replace('.', '/')}/{f.name}" for package in SETTINGS["packages"] for f in files(package)}
    return {
        *modules,
        *(f"{name}/py.typed" for name in SETTINGS["package-data"]),
        "hetu_fx-1.dist-info/licenses/LICENSE",
    }


def test_a_wheel_with_all_modules_and_nothing_else_is_right(tmp_path: Path) -> None:
    assert {"hetu_fx/api.py", "hetu_fx/comm_ops/wire/groups.py", "hetu_fx_align/command.py"} <= whole()
    assert list(wrong_in_wheel(wheel_of(whole(), tmp_path))) == []


@pytest.mark.parametrize("name", ["hetu_fx/comm_ops/wire/groups.py", "hetu_fx/py.typed"])
def test_what_a_wheel_lacks_is_named(name: str, tmp_path: Path) -> None:
    assert list(wrong_in_wheel(wheel_of(whole() - {name}, tmp_path))) == [f"hetu_fx-1.whl lacks {name}"]


@pytest.mark.parametrize("name", ["tests/spawned.py", "comm_ops/wire/groups.py", "hetu_fx/notes.txt"])
def test_what_a_wheel_has_too_much_is_named(name: str, tmp_path: Path) -> None:
    (wrong,) = wrong_in_wheel(wheel_of(whole() | {name}, tmp_path))
    assert wrong == f"hetu_fx-1.whl has {name}, which is in no package"


def test_a_wheel_without_its_licence_is_wrong(tmp_path: Path) -> None:
    names = {name for name in whole() if not name.endswith("LICENSE")}
    assert list(wrong_in_wheel(wheel_of(names, tmp_path))) == ["hetu_fx-1.whl has no LICENSE"]


def test_what_an_sdist_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hetu_fx-1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in IN_SDIST[1:]:
            archive.addfile(tarfile.TarInfo(f"hetu_fx-1/{name}"), io.BytesIO())
    assert list(wrong_in_sdist(path)) == [f"hetu_fx-1.tar.gz lacks {IN_SDIST[0]}"]


class Index:
    """An index that has one torch."""

    def __init__(self, *needs: str) -> None:
        self.needs = list(needs)

    def resolve(self, *words: str) -> list[dict[str, Any]]:
        self.words = words
        return [{"version": "2.11.0", "requires_dist": self.needs}]


@pytest.mark.skipif(sys.platform != "linux", reason="no torch has CUDA there")
def test_a_torch_with_cuda_is_known_and_options_of_pip_are_passed_on() -> None:
    small = Index("numpy", "sympy>=1.13.3")
    assert Torch.find("torch==2.11.* --index-url there", small).brings == []  # type: ignore[arg-type]
    assert small.words[-3:] == ("torch==2.11.*", "--index-url", "there")
    large = Index("sympy", "nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'")
    assert len(Torch.find("torch", large).brings) == 1  # type: ignore[arg-type]
