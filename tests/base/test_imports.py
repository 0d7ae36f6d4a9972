"""A module of ours is imported right after a library, whichever comes first, and the library finds nothing changed."""

from __future__ import annotations

import gc
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

import hetu_fx
from hetu_fx.base import patches
from hetu_fx.base.imports import import_with_library
from hetu_fx.base.patches import install_patches, known_patches, remove_patches


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a library, and a module that asks it for something; return the library's name."""
    (tmp_path / "a_library.py").write_text("asked = []\n")
    (tmp_path / "a_client.py").write_text("import a_library\na_library.asked.append(__name__)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("a_library", "a_client"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(patches, "_known", [])
    monkeypatch.setattr(patches, "_ways_back", {})
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
