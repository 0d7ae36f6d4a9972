"""Copies of parallel models: a deep copy is a parallel model of its own, a pickle holds the plain model, whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hetu_fx.base.frameworks import frameworks
from hetu_fx.base.torch_private import CALL
from hetu_fx.errors import StateError

Parallelize = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]
"""Makes a copy parallel as the model was when it was copied, for a batch like this one; collective."""


class RestoreOriginal:
    """What a parallel model carries in its `__dict__` beside what it had before.

    Args:
        model: before anything is attached.

    Attributes:
        look: called before the model is copied or pickled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = dict(model.__dict__)
        self._names: Collection[str] = ()
        self.look: Callable[[], None] = lambda: None

    def has(self, name: str, value: Any) -> None:
        """Know that the model itself has something else under a name now; None: nothing."""
        self._before.pop(name, None)
        if value is not None:
            self._before[name] = value

    def is_attached(self, model: nn.Module) -> None:
        """Know what has been attached since."""
        before = self._before
        self._names = [name for name, value in model.__dict__.items() if value is not before.get(name, self)]
        self._before = {name: before[name] for name in self._names if name in before}

    def detach_from(self, model: nn.Module) -> None:
        """Take off what was attached to the model."""
        for name in self._names:
            model.__dict__.pop(name, None)
        model.__dict__.update(self._before)

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Take off within a block what was attached to the model."""
        self.look()
        now = {name: model.__dict__[name] for name in self._names if name in model.__dict__}
        self.detach_from(model)
        try:
            yield
        finally:
            model.__dict__.update(now)


_waiting: WeakKeyDictionary[nn.Module, RestoreOriginal] = WeakKeyDictionary()


def attach_copying(model: nn.Module, plain: RestoreOriginal, recipe: Callable[[], Parallelize]) -> None:
    """Let a parallel model be copied and pickled; the last that is attached to it.

    Args:
        model: the model, with all else that is attached.
        plain: was made before anything was attached.
        recipe: called when the model is copied.
    """

    def deep_copy(itself: nn.Module, memo: dict[int, Any]) -> nn.Module:
        with plain.of(itself):
            made = copy.deepcopy(itself, memo)
        attach_later(made, recipe())
        return made

    def reduced(itself: nn.Module, protocol: Any) -> Any:
        with plain.of(itself):
            told = tuple(itself.__reduce_ex__(protocol))
            return *told[:2], *(dict(part) if isinstance(part, dict) else part for part in told[2:])

    object.__setattr__(model, "__deepcopy__", MethodType(deep_copy, model))
    object.__setattr__(model, "__reduce_ex__", MethodType(reduced, model))
    plain.is_attached(model)


def attach_later(made: nn.Module, parallelize: Parallelize, *, is_first: bool = False) -> None:
    """Have a model made parallel when it is first called, as that takes all ranks and a batch.

    A copy of it is made parallel as `parallelize` does. `is_first`: it is no copy, and frameworks leave it alone.
    """
    told = "this model" if is_first else "this copy of a parallel model"

    def forward(itself: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        as_it_was(itself)
        parallelize(itself, args, kwargs)
        return itself.forward(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if vars(made).get("forward") is not waiting:
            raise StateError(
                f"the forward of {told} was replaced before its first call, which makes it parallel\nhint: call it "
                f"first, or replace the forward before {'hetu_fx.auto_parallelize' if is_first else 'copying'}"
            )
        return getattr(type(made), CALL)(made, *args, **kwargs)

    plain = RestoreOriginal(made)
    waiting = MethodType(torch.compiler.disable(forward), made)
    object.__setattr__(made, "forward", waiting)
    object.__setattr__(made, CALL, torch.compiler.disable(call))
    for framework in frameworks() if is_first else ():
        framework.adopt(made)
    attach_copying(made, plain, lambda: parallelize)
    _waiting[made] = plain


def is_parallel(model: object) -> bool:
    """Tell whether a model is parallel, or becomes so at its first call."""
    return hasattr(model, "hetu") or model in _waiting


def as_it_was(model: nn.Module) -> None:
    """Take off a model what would make it parallel at its first call; nothing from any other."""
    plain = _waiting.pop(model, None)
    if plain is not None:
        plain.detach_from(model)
