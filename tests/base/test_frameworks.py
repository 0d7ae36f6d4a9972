"""What frameworks know comes by hooks: integrations fill them when one is first asked."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.base import frameworks, patches
from hetu_fx.base.frameworks import NEWEST, above_tested, import_with_library, numbers, upper_bound, warn_of_newer
from hetu_fx.base.patches import install_patches, known_patches, remove_patches
from hetu_fx.switching.sequences.reader import SequenceOptions


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("2.11.0", ""),
        ("2.14.1", ""),
        ("2.14.1+cpu", ""),
        ("2.15.0", "2.14"),
        ("3.0.0a0", "2.14"),
        ("2.15.0.dev1", "2.14"),
    ],
)
def test_a_later_release_is_above_the_newest_tested(version: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "NEWEST", {"torch": "2.14"})
    assert above_tested("torch", version) == told
    assert above_tested("numpy", version) == ""


def test_the_installed_torch_is_a_tested_one() -> None:
    assert above_tested("torch", metadata.version("torch")) == ""
    assert numbers(NEWEST["torch"]) < numbers(upper_bound(NEWEST["torch"]))


def test_rank_0_warns_and_says_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "NEWEST", {"torch": "2.9"})
    monkeypatch.delenv("RANK", raising=False)
    with pytest.warns(UserWarning, match=r"torch up to 2\.9(.|\n)*hint: .*pip install 'torch<2\.10'"):
        warn_of_newer()
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_newer()


def test_a_library_that_is_not_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_newer()


def test_the_warning_comes_at_import() -> None:
    lines = (
        "import importlib, hetu_fx",
        "hetu_fx.base.frameworks.NEWEST['torch'] = '1.0'",
        "importlib.reload(hetu_fx)",
    )
    code = "\n".join(lines)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "tested with torch up to 1.0" in ended.stderr


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a library, and a module that asks it for something; return the library's name."""
    (tmp_path / "a_library.py").write_text("asked = []\n")
    (tmp_path / "a_client.py").write_text("import a_library\na_library.asked.append(__name__)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("a_library", "a_client"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(patches._table, "known", [])
    monkeypatch.setattr(patches._table, "ways_back", {})
    return "a_library"


def add(library: str) -> None:
    import_with_library(library, "a_client", why="the client is lost", tested="1.0")


def test_the_module_is_imported_after_the_library(library: str) -> None:
    finders = [*sys.meta_path]
    add(library)
    assert library not in sys.modules
    found = __import__(library)
    assert found.asked == ["a_client"]
    assert isinstance(found.__loader__, SourceFileLoader)
    assert found.__spec__.loader is found.__loader__
    assert sys.meta_path == finders


def test_it_is_imported_at_once_where_the_library_is_there(library: str) -> None:
    found = __import__(library)
    add(library)
    assert found.asked == ["a_client"]


def test_it_is_a_patch_that_can_be_taken_out_and_put_in_again(library: str) -> None:
    finders = [*sys.meta_path]
    add(library)
    (patch,) = known_patches()
    assert str(patch) == "sys.meta_path (a_library 1.0): the client is lost"
    remove_patches(library)
    assert sys.meta_path == finders
    install_patches(library)
    assert __import__(library).asked == ["a_client"]
    assert sys.meta_path == finders


def test_a_library_that_is_not_there_stays_missing(library: str) -> None:
    add("no_such_library")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        __import__("no_such_library")
    assert "a_client" not in sys.modules


@pytest.mark.parametrize("looked_for", [True, False])
def test_garbage_is_looked_for_as_it_was_before_a_name_was_imported(looked_for: bool) -> None:
    (gc.enable if looked_for else gc.disable)()
    try:
        assert hetu_fx.Plan
        assert gc.isenabled() is looked_for
    finally:
        gc.enable()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what a test registers."""
    monkeypatch.setattr(frameworks._frameworks, "known", {one.name: one for one in frameworks.frameworks()})


def test_importing_the_package_loads_no_integration() -> None:
    script = "import sys, hetu_fx; print([m for m in sys.modules if m.startswith(('torch', 'hetu_fx.integrations'))])"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_those_of_the_package_are_there_when_a_hook_is_asked() -> None:
    assert [one.name for one in frameworks.frameworks()] == ["accelerate", "transformers"]
    assert frameworks.weight_names().whole == "model.safetensors"
    assert [launcher.command for launcher in frameworks.launchers()] == ["torchrun", "accelerate launch"]
    assert SequenceOptions() == SequenceOptions(("labels",), "position_ids")


def test_another_framework_is_asked_too(registered: None, tmp_path: Path) -> None:
    def writer(model: nn.Module) -> Any:
        return (lambda folder: (folder / "own.txt").write_text("mine")) if hasattr(model, "own") else None

    assert frameworks.config_writer(nn.Linear(2, 2)) is None
    hetu_fx.register_framework(hetu_fx.Framework(name="zoo", config_writer=writer, positions="places"))
    model = nn.Linear(2, 2)
    model.own = True
    write = frameworks.config_writer(model)
    assert write is not None
    write(tmp_path)
    assert (tmp_path / "own.txt").read_text() == "mine"
    assert frameworks.position_input() == "position_ids"


def test_the_optimizer_inside_wrappers_is_found(registered: None) -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.inner = optimizer

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    hetu_fx.register_framework(
        hetu_fx.Framework(name="own", torch_optimizer=lambda given: getattr(given, "inner", given))
    )
    assert frameworks.torch_optimizer(Wrapper(optimizer)) is optimizer  # type: ignore[arg-type]
    assert frameworks.torch_optimizer(optimizer) is optimizer
