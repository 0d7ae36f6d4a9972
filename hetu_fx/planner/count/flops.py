"""FLOPs of the ops of a captured program, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from hetu_fx.base.torch_private import tree_map
from hetu_fx.graph import meta


class FlopCounter:
    """Counts the FLOPs of ops by running them on meta tensors; equal calls are run once.

    `size_of` says what a size is; left out: as in the example.
    """

    def __init__(self, size_of: Callable[[meta.Size], int] = meta.hint) -> None:
        self._size_of = size_of
        self._known: dict[str, int] = {}

    def flops(self, node: fx.Node) -> int:
        """Return the FLOPs of an op node; 0 for one that cannot run without data."""
        args, kwargs = tree_map(self._meta_argument, (node.args, node.kwargs))
        key = f"{node.target} {tree_map(_description, (args, kwargs))}"
        if key not in self._known:
            self._known[key] = _count(node.target, args, kwargs)
        return self._known[key]

    def _meta_argument(self, argument: Any) -> Any:
        return tree_map(self._without_symbols, meta.value(argument)) if isinstance(argument, fx.Node) else argument

    def _without_symbols(self, value: Any) -> Any:
        match value:
            case torch.Tensor():
                return torch.empty(list(map(self._size_of, value.shape)), dtype=value.dtype, device="meta")
            case torch.SymInt():
                return self._size_of(value)
            case _:
                return value


def _description(argument: Any) -> Any:
    return (tuple(argument.shape), argument.dtype) if isinstance(argument, torch.Tensor) else argument


def _count(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    placed = {**kwargs, "device": "meta"} if "device" in kwargs else dict(kwargs)
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            target(*args, **placed)
    except (RuntimeError, NotImplementedError):
        return 0  # an op whose result depends on data, or without a meta kernel, is no product
    return int(counter.get_total_flops())
