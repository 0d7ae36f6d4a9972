"""Tensors whose value is still on its way between ranks: the first op that reads one waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetu_fx.base.torch_private import disabled_torch_function, tree_flatten, tree_unflatten

aten = torch.ops.aten

# Ops that read nothing of a tensor but its shape and dtype, as autograd does to start from a loss.
_READ_NO_VALUE = {aten.ones_like.default, aten.zeros_like.default, aten.empty_like.default}


class Pending(torch.Tensor):
    """A tensor without its value yet; its kinds say how several are settled together, after which `value` is plain.

    Any op on it, reading it included, first settles all pending tensors among its arguments.
    """

    value: torch.Tensor | None

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def settle(cls, pending: Sequence[Any]) -> None:
        """Give each a value that has none; all are of this kind."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Settle what is pending among the arguments, then run the op on their values."""
        if func in _READ_NO_VALUE:
            shape, dtype, device = args[0].shape, args[0].dtype, args[0].device
            return func(torch.empty(shape, dtype=dtype, device=device), *args[1:], **(kwargs or {}))
        flat, spec = tree_flatten((args, kwargs or {}))
        for kind in dict.fromkeys(type(leaf) for leaf in flat if isinstance(leaf, Pending)):
            kind.settle([leaf for leaf in flat if type(leaf) is kind])
        flat = [leaf.value if isinstance(leaf, Pending) else leaf for leaf in flat]
        plain_args, plain_kwargs = tree_unflatten(flat, spec)
        return func(*plain_args, **plain_kwargs)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Settle it and pickle it as a plain tensor."""
        return (self + 0).detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Settle it and copy it as a plain tensor."""
        return (self + 0).detach()

    def numpy(self, *, force: bool = False) -> Any:
        """Settle it and give it as an array."""
        return (self + 0).numpy(force=force)

    def tolist(self) -> Any:
        """Settle it and give it as a number."""
        return self.item()
