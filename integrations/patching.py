"""What is replaced in other libraries: one list, put in when a parallel model meets them, taken out by `unpatch`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from hetu_fx.errors import EnvironmentProblem


@dataclass(frozen=True)
class Patch:
    """One attribute of a class of another library that is replaced while there are parallel models.

    Attributes:
        library: what it is installed as.
        module, owner, name: where the attribute is: the module, the class in it, and the attribute's name.
        why: what would be wrong without it.
        tested: the beginning of the versions that it was tested with.
        wrap: makes what is put in, from what was there; for models that are not parallel it does what that does.
    """

    library: str
    module: str
    owner: str
    name: str
    why: str
    tested: str
    wrap: Callable[[Any], Any]

    def __str__(self) -> str:
        return f"{self.module}.{self.owner}.{self.name} ({self.library} {self.tested}): {self.why}"


_known: list[Patch] = []
_replaced: dict[Patch, Any] = {}


def register_patch(patch: Patch) -> None:
    """Have a patch put in as soon as its module is loaded and a parallel model is there."""
    _known.append(patch)


def patches() -> tuple[Patch, ...]:
    """Return everything that is replaced in other libraries, whether it is in or not."""
    for one in iter_modules([str(Path(__file__).parent)]):
        import_module(f"hetu_fx.integrations.{one.name}")  # it registers what it replaces
    return tuple(_known)


def patch_what_is_loaded() -> None:
    """Put in the patches of all modules that are loaded by now; what is in stays.

    Raises:
        EnvironmentProblem: the installed version has no such attribute.
    """
    for patch in patches():
        if patch not in _replaced and patch.module in sys.modules:
            owner = getattr(sys.modules[patch.module], patch.owner, None)
            if owner is None or patch.name not in vars(owner):
                raise EnvironmentProblem(
                    f"{patch.library} {version(patch.library)} has no {patch.module}.{patch.owner}.{patch.name}, which "
                    f"is needed: {patch.why}; install {patch.library}=={patch.tested}.*"
                )
            _replaced[patch] = vars(owner)[patch.name]
            setattr(owner, patch.name, patch.wrap(_replaced[patch]))


def unpatch() -> None:
    """Put back what was there before; the next model that is made parallel has the patches put in again."""
    for patch, original in _replaced.items():
        setattr(getattr(sys.modules[patch.module], patch.owner), patch.name, original)
    _replaced.clear()
