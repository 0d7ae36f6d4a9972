"""Functions with a backward of their own: whether that is the derivative of their forward.

A captured graph has such a function's forward only, and differentiates that. Where the backward says something else
(a straight-through estimator: the forward rounds, the backward passes on) the graph would have other gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.torch_private import is_setup_context_defined
from hetu_fx.graph import meta

STEP = 1e-6
TOLERANCE = 1e-4
MOST_ELEMENTS = 2**24

Function = type[torch.autograd.Function]


def is_derivative(function: Function, arguments: Sequence[Any]) -> bool:
    """Tell whether a function's backward is the derivative of its forward, along a random direction.

    It is called on random numbers in the shapes of `arguments`, which may be fake tensors. False also where that
    cannot be found out: the function fails on them, or they are very large.
    """
    with ThreadPoolExecutor(1) as elsewhere:  # a thread of its own is in none of the modes of a trace
        try:
            return elsewhere.submit(_agrees, function, arguments).result()
        except Exception:  # whatever a user's function raises on numbers that it was not meant for
            return False


class _Context:
    """What a forward leaves for its backward."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(_is_float(argument) for argument in arguments)
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("mark_", "set_", "save_")):
            return lambda *given: None
        raise AttributeError(name)


def _agrees(function: Function, arguments: Sequence[Any]) -> bool:
    if sum(argument.numel() for argument in arguments if isinstance(argument, Tensor)) > MOST_ELEMENTS:
        return False
    generator = torch.Generator().manual_seed(0)
    given = [_numbers(argument, generator) for argument in arguments]
    ways = [torch.randn(x.shape, generator=generator, dtype=x.dtype) if _is_float(x) else None for x in given]
    context = _Context(given)
    results = _forward(function, context, given)
    weights = [torch.randn(y.shape, generator=generator, dtype=y.dtype) if _is_float(y) else y for y in results]
    gradients = _listed(function.backward(context, *weights))
    expected = sum(float((g * v).sum()) for g, v in zip(gradients, ways, strict=True) if None not in (g, v))
    ahead, behind = (_forward(function, _Context(given), _moved(given, ways, h)) for h in (STEP, -STEP))
    pairs = zip(weights, ahead, behind, strict=True)
    found = sum(float((w * (a - b)).sum()) / (2 * STEP) for w, a, b in pairs if _is_float(a))
    return abs(found - expected) <= TOLERANCE * max(abs(found), abs(expected), 1.0)


def _forward(function: Function, context: _Context, given: Sequence[Any]) -> list[Any]:
    if not is_setup_context_defined(function):
        return _listed(function.forward(context, *given))
    output = function.forward(*given)
    function.setup_context(context, tuple(given), output)
    return _listed(output)


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _numbers(argument: Any, generator: torch.Generator) -> Any:
    """Return positive random numbers in the shape of a tensor, ones for integers; what is no tensor as it is."""
    if not isinstance(argument, Tensor):
        return argument
    shape = [meta.hint(size) for size in argument.shape]
    if not argument.is_floating_point():
        return torch.ones(shape, dtype=argument.dtype)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.6 + 0.2


def _moved(given: Sequence[Any], ways: Sequence[Tensor | None], step: float) -> list[Any]:
    return [x if way is None else x + step * way for x, way in zip(given, ways, strict=True)]
