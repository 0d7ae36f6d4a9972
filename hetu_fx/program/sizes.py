"""Sizes of a step: what the captured graph's symbols stand for, and logical shapes in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch

from hetu_fx.errors import BatchError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Leaf
from hetu_fx.transforms.specialize.device_graph import LogicalShape

Bindings = Mapping[sympy.Symbol, int]


def bind(leaves: Iterable[Leaf], tensors: Mapping[str, torch.Tensor]) -> dict[sympy.Symbol, int]:
    """Return what each symbol of the inputs' shapes stands for in this batch.

    Raises:
        BatchError: an input is missing, has another rank, or a size that the captured graph fixes.
    """
    bindings: dict[sympy.Symbol, int] = {}
    for leaf in leaves:
        tensor = tensors[leaf.name]
        expected = meta.shape(leaf.node)
        if tensor.dim() != len(expected):
            raise BatchError(
                f"input {leaf.name!r} has {tensor.dim()} dims {tuple(tensor.shape)}, but the model was captured with "
                f"{len(expected)}; pass an example batch of that form to hetu_fx.auto_parallelize"
            )
        for dim, (size, actual) in enumerate(zip(expected, tensor.shape, strict=True)):
            _bind_size(bindings, leaf.name, dim, meta.expression(size), int(actual))
    return bindings


def _bind_size(bindings: dict[sympy.Symbol, int], name: str, dim: int, expected: Any, actual: int) -> None:
    if isinstance(expected, sympy.Symbol):
        expected = bindings.setdefault(expected, actual)
    elif isinstance(expected, sympy.Expr) and expected.free_symbols:
        expected = expected.subs(bindings)
        if expected.free_symbols:
            return
    if int(expected) != actual:
        raise BatchError(
            f"dim {dim} of input {name!r} has size {actual}, but the captured graph needs {int(expected)} there; "
            f"pad the batch to that size, or call hetu_fx.auto_parallelize with an example of the new size"
        )


def evaluate(shape: LogicalShape, bindings: Bindings) -> tuple[int, ...]:
    """Return a logical shape in numbers."""
    return tuple(int(size.subs(bindings)) if isinstance(size, sympy.Expr) else size for size in shape)
