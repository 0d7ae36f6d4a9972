"""Answers that are worked out once: searches ask the same few things over and over."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def once(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Have a method work out its answer once for each object and arguments, which are hashable."""
    return once_per_object(lambda self: (self, ()))(method)


def once_per_object(
    place: Callable[[S], tuple[Any, tuple[Any, ...]]],
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Return `once` for objects that come and go: `place` tells what keeps the answers, and what equal ones share."""

    def decorated(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        name = f"known {method.__qualname__}"

        def asked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            keeper, own = place(self)
            known: dict[tuple[Any, ...], T] = keeper.__dict__.setdefault(name, {})
            key = (*own, *args, *kwargs.items()) if kwargs else own + args
            if key not in known:
                known[key] = method(self, *args, **kwargs)
            return known[key]

        update_wrapper(asked, method)
        return asked

    return decorated
