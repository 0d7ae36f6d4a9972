"""Mistakes, read from `mutants.txt`, and how a process comes to import a module with one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
VARIABLE = "HETU_FX_MUTANT"  # names the mistake that a process is started with
_HEADING = "== on processes =="
_SCRIPTS_HEADING = "== noticed by scripts =="
FILES = ("mutants.txt", "guards.txt", "kinds.txt")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake: in the file at `path`, the text `old`, which stands there once, becomes `new`.

    `on_processes` says that only tests on real processes can see it. `scripts` are names of what scripts do that should
    notice it, for a mistake in the guards; with `only_scripts` no test is held to. `tests` are those that should notice
    it, where it is not for the tests of its folder.
    """

    name: str
    path: str
    old: str
    new: str
    on_processes: bool
    scripts: tuple[str, ...] = ()
    only_scripts: bool = False
    tests: tuple[str, ...] = ()

    def apply(self, source: str) -> str:
        """Give the source with the mistake; ValueError where the place is not found, or not the only one."""
        if source.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"mutant {self.name!r}: {self.old!r} stands {source.count(self.old)} times in {self.path}")
        return source.replace(self.old, self.new)


def read_mutants() -> Mapping[str, Mutant]:
    """Read the mistakes by name: blocks of four lines, and one for each script (!) or test (?) that should notice."""
    found: dict[str, Mutant] = {}
    for file in FILES:
        heading = ""
        for block in (ROOT / "benchmarks" / "mutants" / file).read_text().split("\n\n"):
            lines = block.strip().splitlines()
            if len(lines) < 4:
                heading = block.strip()
                continue
            path, old, new = (line[2:] for line in lines[1:4])
            scripts, tests = (tuple(line[2:] for line in lines[4:] if line[0] == mark) for mark in "!?")
            only_scripts = heading == _SCRIPTS_HEADING
            found[lines[0]] = Mutant(lines[0], path, old, new, heading == _HEADING, scripts, only_scripts, tests)
    return found


def install(root: Path = ROOT) -> None:
    """Make this process import the sources under `root` with the mistake that its environment names, if any."""
    name = os.environ.get(VARIABLE)
    if name is not None:
        sys.meta_path.insert(0, _Finder(read_mutants()[name], root))


class _Loader(SourceFileLoader):
    """Loads the source with the mistake, past all caches of byte code."""

    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self.mutant = mutant

    def path_stats(self, path: Any) -> Any:
        raise OSError("no byte code of a mistake is read or written")

    def source_to_code(self, data: Any, path: Any, *args: Any, **options: Any) -> CodeType:
        return super().source_to_code(self.mutant.apply(bytes(data).decode()).encode(), path, *args, **options)


@dataclass(frozen=True)
class _Finder:
    mutant: Mutant
    root: Path

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("hetu_fx."):
            return None
        spec = PathFinder.find_spec(name, path)
        if (
            spec is None
            or spec.origin is None
            or Path(spec.origin).resolve() != (self.root / self.mutant.path).resolve()
        ):
            return None
        spec.loader = _Loader(name, spec.origin, self.mutant)
        return spec
