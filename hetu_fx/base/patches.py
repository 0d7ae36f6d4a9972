"""What is replaced in other libraries, torch among them: one table, put in when a parallel model meets them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from threading import Lock
from types import CodeType, FunctionType
from typing import Any, Protocol

from hetu_fx.errors import EnvironmentProblem

PLAN_VARIABLE = "HETU_FX_PLAN"
"""Of the environment: the plan of scripts that name none. With it accelerate is patched as soon as it is there."""


class _Handle(Protocol):
    def remove(self) -> None: ...


@dataclass(frozen=True, eq=False)  # one is looked up at each home tensor that is made
class Patch:
    """One attribute of another library that is replaced while there are parallel models.

    Attributes:
        library: what it is installed as.
        module, owner, name: where the attribute is: the module, the class in it ("": the module itself), and its name.
        why: what would be wrong without it.
        tested: the beginning of the versions that it was tested with.
        wrap: makes what is put in, from what was there; for models that are not parallel it does what that does.
        is_needed: False: nothing is wrong without it, only slow, so that a library may lack the attribute.
    """

    library: str
    module: str
    owner: str
    name: str
    why: str
    tested: str
    wrap: Callable[[Any], Any]
    is_needed: bool = True

    def __str__(self) -> str:
        place = ".".join(filter(None, (self.module, self.owner, self.name)))
        return f"{place} ({self.library} {self.tested}): {self.why}"

    def put_in(self) -> Callable[[], None]:
        """Replace the attribute; return what puts the original back.

        Raises:
            EnvironmentProblem: the installed version has no such attribute, which is needed.
        """
        module = sys.modules[self.module]
        owner = getattr(module, self.owner, None) if self.owner else module
        if owner is None or self.name not in vars(owner):
            if not self.is_needed:
                return _nothing
            raise EnvironmentProblem(
                f"{self.library} {version(self.library)} has no {self.module}.{self.owner}.{self.name}, which "
                f"is needed: {self.why}\nhint: pip install '{self.library}=={self.tested}.*'"
            )
        original = vars(owner)[self.name]
        setattr(owner, self.name, self.wrap(original))
        return partial(setattr, owner, self.name, original)


@dataclass(frozen=True, eq=False)  # one is looked up at each home tensor that is made
class Hook:
    """One hook on all objects of a kind of another library, while there are parallel models.

    Attributes:
        library, module, why, tested: as of a Patch.
        name: the function that registers the hook, for messages.
        register: registers it, and returns its handle.
    """

    library: str
    module: str
    name: str
    why: str
    tested: str
    register: Callable[[], _Handle]

    def __str__(self) -> str:
        return f"{self.module}.{self.name} ({self.library} {self.tested}): {self.why}"

    def put_in(self) -> Callable[[], None]:
        """Register the hook; return what takes it away."""
        return self.register().remove


Substitute = Callable[[FunctionType], Callable[..., Any]]


class _Table:
    """All that is replaced, or is to be.

    Attributes:
        known: what is registered.
        substitutes: what makes those of forwards, by module and name.
        ways_back: what puts the original back, of what is in.
        lock: of changes, as ranks may be threads of one process.
    """

    def __init__(self) -> None:
        self.known: list[Patch | Hook] = []
        self.substitutes: dict[tuple[str, str], Substitute] = {}
        self.ways_back: dict[Patch | Hook, Callable[[], None]] = {}
        self.lock = Lock()


_table = _Table()


def register_patch(patch: Patch | Hook) -> None:
    """Have a patch put in as soon as its module is loaded and a parallel model is there."""
    _table.known.append(patch)


def add_patch(patch: Patch | Hook) -> None:
    """Put in what has to be in before there is a parallel model, and register it."""
    way_back = patch.put_in()  # without the lock: what it imports may put in patches of its own
    with _table.lock:
        register_patch(patch)
        _table.ways_back[patch] = way_back


def register_substitute(module: str, name: str, make: Substitute) -> None:
    """Have what a library puts in a parallel model's `forward`, beside which nothing would run, replaced there.

    Args:
        module: where the function is written.
        name: its qualified name there, as in its code.
        make: given the function, returns what takes its place, which calls the forward that the function has found.
    """
    _table.substitutes[module, name] = make


def substitute_of(forward: Any) -> Substitute | None:
    """Return what makes the substitute of a forward that a script or a library has put in a model; None: nothing."""
    code, space = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    return (
        _table.substitutes.get((str(space.get("__name__")), code.co_qualname)) if isinstance(code, CodeType) else None
    )


def known_patches() -> tuple[Patch | Hook, ...]:
    """Return all that is registered, whether it is in or not."""
    return tuple(_table.known)


def install_patches(library: str | None = None) -> None:
    """Put in the patches of a library (None: of all), as far as it is loaded by now; what is in stays.

    Raises:
        EnvironmentProblem: the installed version lacks what is needed.
    """
    with _table.lock:
        for patch in _table.known:
            if patch not in _table.ways_back and library in (None, patch.library) and patch.module in sys.modules:
                _table.ways_back[patch] = patch.put_in()


def remove_patches(library: str) -> None:
    """Put back what was there before in a library; the next `install_patches` puts its patches in again."""
    with _table.lock:
        for patch in [one for one in _table.ways_back if one.library == library]:
            _table.ways_back.pop(patch)()


def _nothing() -> None:
    """There is nothing to put back."""
