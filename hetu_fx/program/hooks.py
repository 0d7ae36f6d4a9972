"""Hooks of submodules: those that change what passes through are captured, others are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

from torch import nn

from hetu_fx.base.frameworks import frameworks
from hetu_fx.base.torch_private import BACKWARD_HOOKS, FORWARD_HOOKS, GLOBAL_HOOKS
from hetu_fx.errors import CaptureError
from hetu_fx.program.structure import place, told_hook

_EAGER = 'use hetu_fx.auto_parallelize(..., capture="eager"), which runs the module as it is'
_OF_TORCH = ("torch.nn.utils.", "torch.ao.")
"""Whose hooks work out a module's weights; they are part of its forward."""


def check_global_hooks() -> None:
    """Refuse hooks that are registered for all modules. Raises CaptureError; before each step."""
    for hook in chain.from_iterable(map(dict.values, GLOBAL_HOOKS)):
        raise CaptureError(
            f"hook {told_hook(hook)} is registered for all modules, but a captured graph has none left that call it; "
            f"remove it, or {_EAGER}"
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
                    f"no module has a gradient of its own; remove it, or {_EAGER}"
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
    @functools.wraps(hook)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None:
            raise CaptureError(
                f"{what} returns nothing: it only looks, and would see fakes while the model is captured and "
                f"nothing in any step; use model.hetu.observe({name!r}, fn), which has the output after each step, let "
                f"it return what it changes, or {_EAGER}"
            )
        return result

    return checked


def _is_of_the_model(hook: Any) -> bool:
    """Tell whether a hook belongs to how the model works: registered by torch or a framework, not by the script."""
    function = getattr(hook, "__func__", hook)
    home = str(getattr(function, "__module__", type(hook).__module__))
    return home.startswith((*_OF_TORCH, *(prefix for framework in frameworks() for prefix in framework.own_hooks)))
