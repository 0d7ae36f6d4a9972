"""Modules of ours that are imported once a library is there, and not before: importing hetu_fx loads no library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from hetu_fx.base.patches import Hook, add_patch


def import_with_library(library: str, module: str, *, why: str, tested: str) -> None:
    """Import `module` as soon as `library` has been imported; at once, where it has been already.

    It is in the table of patches until then, as one of the package that the library is in.
    """
    package = library.partition(".")[0]
    add_patch(Hook(package, "sys", "meta_path", why, tested, partial(_Finder.put_in, library, module)))


class _Finder(MetaPathFinder):
    """Finds the library where it is, and has a module of ours imported after it."""

    def __init__(self, library: str, module: str) -> None:
        self.library, self.module = library, module

    @classmethod
    def put_in(cls, library: str, module: str) -> _Finder:
        """Import the module where the library is there, else have Python ask a finder for that."""
        made = cls(library, module)
        if library in sys.modules:
            import_module(module)
        else:
            sys.meta_path.insert(0, made)
        return made

    def remove(self) -> None:
        """Be asked no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.library or self not in sys.meta_path:
            return None
        self.remove()
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.module)
        return spec


class _Then(Loader):
    """Loads a library as its own loader does, and imports a module of ours."""

    def __init__(self, loader: Loader, module: str) -> None:
        self.loader, self.module = loader, module

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the library for its files later finds its own loader.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        import_module(self.module)
