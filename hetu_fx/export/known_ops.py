"""Make our ops known before torch reads a `.pt2`, so that `import hetu_fx` is all that device graphs need.

Importing hetu_fx imports no torch. So the ops are imported when torch first imports what reads and writes archives, or
at once, where that is there already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from hetu_fx.export import OPS

ARCHIVES = "torch.export.pt2_archive"
"""The package that torch.export.load imports when it is first called."""


def know_ops_in_time() -> None:
    """Have our ops known whenever torch reads a `.pt2` from now on."""
    if ARCHIVES in sys.modules:
        _know_ops()
    else:
        sys.meta_path.insert(0, _BeforeArchives())


class _BeforeArchives(MetaPathFinder):
    """Finds nothing; it imports our ops when somebody looks for what reads archives."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == ARCHIVES and self in sys.meta_path:
            sys.meta_path.remove(self)
            _know_ops()
        return None


def _know_ops() -> None:
    for module in OPS:
        import_module(module)
