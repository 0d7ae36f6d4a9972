"""What the script has registered at submodules: observers, whose outputs are the graph's, too, and hooks.

Hooks that change what passes through are captured, others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import chain
from typing import Any

from torch import Tensor, nn

from hetu_fx.base.frameworks import frameworks
from hetu_fx.base.torch_private import BACKWARD_HOOKS, FORWARD_HOOKS, GLOBAL_HOOKS, tree_map_only
from hetu_fx.errors import CaptureError, StateError
from hetu_fx.program.structure import place, told_hook

Observer = Callable[[Any], None]

_EAGER = 'use hetu_fx.auto_parallelize(..., capture="eager"), which runs the module as it is'
_OF_TORCH = ("torch.nn.utils.", "torch.ao.")
"""Whose hooks work out a module's weights; they are part of its forward."""


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
            raise StateError(f"there is no submodule {name!r} to observe\nhint: name one of {', '.join(names)}")
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
                f"{place(name)} is observed, but the forward does not call it (or calls a method of it)\n"
                f"hint: observe one that is called"
            )


def _collect(found: dict[str, Any], name: str, module: nn.Module, given: Any, output: Any) -> None:
    if name in found:
        raise CaptureError(
            f"{place(name)} is observed, but the forward calls it several times\n"
            f"hint: observe a module that is called once"
        )
    found[name] = tree_map_only(Tensor, Tensor.clone, output)


def check_global_hooks() -> None:
    """Refuse hooks that are registered for all modules. Raises CaptureError; before each step."""
    for hook in chain.from_iterable(map(dict.values, GLOBAL_HOOKS)):
        raise CaptureError(
            f"hook {told_hook(hook)} is registered for all modules, but a captured graph has none left that call it\n"
            f"hint: remove it, or {_EAGER}"
        )


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks that a graph cannot have.

    Raises:
        CaptureError: a submodule has backward hooks.
    """
    for name, module in model.named_modules():
        for kind, what in BACKWARD_HOOKS.items():
            for hook in getattr(module, kind).values() if name else ():
                raise CaptureError(
                    f"{place(name)} has a {what} {told_hook(hook)}, but backward runs as one captured graph, in which "
                    f"no module has a gradient of its own\nhint: remove it, or {_EAGER}"
                )


@contextmanager
def hooks_must_change(model: nn.Module) -> Iterator[None]:
    """Refuse forward hooks of submodules that return nothing, while the forward is traced.

    They only look: at fakes while the model is traced, and never again. Raises CaptureError inside.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            for kind, what in FORWARD_HOOKS.items():
                hooks = getattr(module, kind)
                for number, hook in list(hooks.items()) if name else ():
                    if not _is_of_the_model(hook):
                        hooks[number] = _checked(hook, f"{what} {told_hook(hook)} of {place(name)}", name)
                        stack.callback(hooks.__setitem__, number, hook)
        yield


def _checked(hook: Callable[..., Any], what: str, name: str) -> Callable[..., Any]:
    @wraps(hook)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None:
            raise CaptureError(
                f"{what} returns nothing: it only looks, and would see fakes while the model is captured and "
                f"nothing in any step\n"
                f"hint: use model.hetu.observe({name!r}, fn), which has the output after each step; return what the "
                f"hook changes; or {_EAGER}"
            )
        return result

    return checked


def _is_of_the_model(hook: Any) -> bool:
    """Tell whether a hook belongs to how the model works: registered by torch or a framework, not by the script."""
    function = getattr(hook, "__func__", hook)
    home = str(getattr(function, "__module__", type(hook).__module__))
    return home.startswith((*_OF_TORCH, *(prefix for framework in frameworks() for prefix in framework.own_hooks)))
