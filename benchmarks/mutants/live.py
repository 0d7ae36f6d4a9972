"""Let this process have a mistake in functions that it has imported already: their code becomes other code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType

from benchmarks.mutants.mutant import ROOT, Mutant

Place = tuple[str, int]
"""A function's name with those of its classes, and the line that it begins in."""


def break_functions(mutant: Mutant, root: Path = ROOT) -> int:
    """Have a mistake; give the number of functions that have other code. ValueError where there are none."""
    path = (root / mutant.path).resolve()
    import_module(_module(mutant.path))
    source = path.read_text()
    before, after = (dict(_functions(compile(text, str(path), "exec"))) for text in (source, mutant.apply(source)))
    changed = {place: code for place, code in after.items() if before.get(place) != code}
    found = [function for function in _living(path) if _place(function.__code__) in changed]
    for function in found:
        function.__code__ = changed[_place(function.__code__)]
    if not found:
        raise ValueError(f"mutant {mutant.name!r} changes no function that has been imported from {path}")
    return len(found)


def _module(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".")
    return name if name.startswith("hetu_fx.") else f"hetu_fx.{name}"


def _living(path: Path) -> list[FunctionType]:
    """Give the functions of a file, also what decorators have hidden."""
    gc.unfreeze()  # tests freeze what they have imported, and what is frozen is not told
    every = (one for one in gc.get_objects() if type(one) is FunctionType)
    return [one for one in every if one.__code__.co_filename.endswith(path.name) and _is_of(one, path)]


def _is_of(function: FunctionType, path: Path) -> bool:
    return Path(function.__code__.co_filename).resolve() == path


def _functions(code: CodeType) -> Iterator[tuple[Place, CodeType]]:
    """Yield the functions of a module and of its classes; what is nested in them is part of them."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield _place(constant), constant
            if not constant.co_flags & 1:  # the body of a class, which has no local variables of its own
                yield from _functions(constant)


def _place(code: CodeType) -> Place:
    return code.co_qualname, code.co_firstlineno
