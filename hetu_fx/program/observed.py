"""Outputs of submodules that the script wants to see after each step: they are outputs of the graph, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from hetu_fx.base.torch_private import tree_map_only
from hetu_fx.errors import CaptureError, StateError
from hetu_fx.program.structure import place

Observer = Callable[[Any], None]


class Observation:
    """One observer of a submodule; `remove` ends it, before the same step on all ranks."""

    def __init__(self, name: str, tell: Observer, among: list[Observation]) -> None:
        self.name, self.tell, self._among = name, tell, among
        among.append(self)

    def remove(self) -> None:
        """Let it see no more."""
        if self in self._among:
            self._among.remove(self)


class Observers:
    """The observers of a model's submodules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._all: list[Observation] = []

    def observe(self, name: str, tell: Observer) -> Observation:
        """Let `tell` have the output of the module of a name after each forward.

        Raises:
            StateError: there is no such submodule.
        """
        names = [known for known, _ in self.model.named_modules() if known]
        if name not in names:
            raise StateError(f"there is no submodule {name!r} to observe; there are {', '.join(names)}")
        return Observation(name, tell, self._all)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the modules that are observed, each once."""
        return tuple(sorted({one.name for one in self._all}))

    def tell(self, found: dict[str, Any]) -> None:
        """Give observers what the modules have made, by name."""
        for one in tuple(self._all):
            if one.name in found:
                one.tell(found[one.name])

    @contextmanager
    def collecting(self) -> Iterator[dict[str, Any]]:
        """Collect the outputs of observed modules, of a forward inside, as they are when the module returns them.

        Raises:
            CaptureError: the forward does not call one of them.
        """
        names, found = self.names, dict[str, Any]()
        with ExitStack() as stack:
            for name in names:
                handle = self.model.get_submodule(name).register_forward_hook(partial(_collect, found, name))
                stack.callback(handle.remove)
            yield found
        _check_called(names, found)


def _check_called(names: Iterable[str], found: dict[str, Any]) -> None:
    for name in names:
        if name not in found:
            raise CaptureError(
                f"{place(name)} is observed, but the forward does not call it (or calls a method of it); observe one "
                f"that is called"
            )


def _collect(found: dict[str, Any], name: str, module: nn.Module, given: Any, output: Any) -> None:
    if name in found:
        raise CaptureError(
            f"{place(name)} is observed, but the forward calls it several times; observe a module that is called once"
        )
    found[name] = tree_map_only(Tensor, Tensor.clone, output)
