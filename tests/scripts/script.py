"""What a script does to its model: an entry, run as the plain script on one device and with the model made parallel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from tests.scripts.job import Job
from tests.scripts.settings import USUAL

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Script:
    """One thing that scripts do.

    Attributes:
        name: a phrase that says what, such as "freezes a BatchNorm after the call".
        area: the module of `tests.scripts.entries` or `tests.scripts.tables` that it stands in.
        run: does it, and returns what must be the same as on one device: tensors, numbers, texts; alike on all ranks.
        refused: a part of the message, where it is refused by name; "" where it must come out right.
        settings: the names of those in which it makes sense.
        tolerance: relative, of a tensor's largest value.
        seconds: the bound on it, after which it counts as a hang.
    """

    name: str
    area: str
    run: Callable[[Job], Results]
    refused: str = ""
    settings: tuple[str, ...] = USUAL
    tolerance: float = 1e-9
    seconds: float = 180.0


_FOLDER = Path(__file__).parent

_ALL: dict[str, Script] = {}


def script(
    name: str,
    *,
    refused: str = "",
    settings: tuple[str, ...] = USUAL,
    tolerance: float = 1e-9,
    seconds: float = 180.0,
) -> Callable[[Callable[[Job], Results]], Callable[[Job], Results]]:
    """Enter a function as what scripts do; see `Script`."""

    def enter(run: Callable[[Job], Results]) -> Callable[[Job], Results]:
        area = run.__module__.rpartition(".")[2]
        assert name not in _ALL, f"two scripts are called {name!r}"
        _ALL[name] = Script(name, area, run, refused, settings, tolerance, seconds)
        return run

    return enter


def usual() -> list[Script]:
    """Return the entries of all areas that have no table of their own."""
    return [one for one in scripts().values() if not has_own_table(one)]


def has_own_table(one: Script) -> bool:
    """Tell whether an entry is run only where its area is named: such are long."""
    return one.area in _modules("tables")


def scripts() -> dict[str, Script]:
    """Return all entries by name, in the order of their files."""
    for folder in ("entries", "tables"):
        for name in _modules(folder):
            import_module(f"tests.scripts.{folder}.{name}")
    return dict(_ALL)


@functools.cache
def _modules(folder: str) -> tuple[str, ...]:
    return tuple(sorted(found.name for found in iter_modules([str(_FOLDER / folder)])))
