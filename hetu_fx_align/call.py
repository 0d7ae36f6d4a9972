"""One call of an op with its arguments: what is run in two ways, saved, and told apart from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.torch_private import OpOverload, argument_names, schema, tree_flatten, tree_leaves, tree_unflatten

Leaf = Any
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Call:
    """An op and its arguments, tensors with their values.

    Attributes:
        op: the op.
        leaves: of the arguments, flattened: tensors, numbers, dtypes and such.
        tree: how they are nested; opaque.
        needs_gradient: for each of the tensors, whether a gradient for it is asked for.
    """

    op: OpOverload[..., Any]
    leaves: tuple[Leaf, ...]
    tree: Any
    needs_gradient: tuple[bool, ...]

    @classmethod
    def of(cls, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Take a call apart; its tensors are those that are given."""
        leaves, tree = tree_flatten((args, dict(kwargs)))
        wanted = tuple(leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor))
        return cls(op, tuple(leaves), tree, wanted)

    def detached(self) -> Call:
        """Return the call without the history of its tensors, whose values are shared."""
        return self.mapped(Tensor.detach)

    @property
    def name(self) -> str:
        """Return the op's name, such as aten.linear.default."""
        return str(self.op)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors among the arguments."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))

    @cached_property
    def key(self) -> str:
        """Return a text that is equal for calls of the same op with arguments that look the same."""
        return f"{self.name} {self.tree} {[_look(leaf) for leaf in self.leaves]} {self.needs_gradient}"

    @property
    def shapes(self) -> str:
        """Return the sizes of its tensors: `4x6 3x6`."""
        return " ".join("x".join(map(str, tensor.shape)) or "()" for tensor in self.tensors)

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """Return the names of the arguments that its tensors are, by the op's schema."""
        args, kwargs = self.mapped_leaves(lambda leaf: leaf)
        names = [argument.name for argument in schema(self.op).arguments]
        pairs = [*zip(names, args, strict=False), *kwargs.items()]
        return tuple(name for name, value in pairs for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

    def arguments(self) -> Arguments:
        """Return the arguments as the op takes them."""
        return self.mapped_leaves(lambda leaf: leaf)

    def mapped_leaves(self, function: Callable[[Leaf], Leaf]) -> Arguments:
        """Return the arguments with a function of each leaf in its place."""
        args, kwargs = tree_unflatten([function(leaf) for leaf in self.leaves], self.tree)
        return tuple(args), kwargs

    def mapped(self, tensor: Callable[[Tensor], Tensor], number: Callable[[float], float] = lambda n: n) -> Call:
        """Return the call with functions of its tensors and of its real numbers in their places."""

        def changed(leaf: Leaf) -> Leaf:
            if isinstance(leaf, Tensor):
                return tensor(leaf)
            return number(leaf) if isinstance(leaf, float) else leaf

        return replace(self, leaves=tuple(map(changed, self.leaves)))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Call:
        """Return the call with other tensors."""
        left = iter(tensors)
        return replace(self, leaves=tuple(next(left) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves))

    def unshared(self) -> Call:
        """Return the call with copies of the tensors that the op writes to; others see nothing of it."""
        written = set(argument_names(self.op).written)
        if not written:
            return self
        pairs = zip(self.tensor_names, self.tensors, strict=True)
        return self.with_tensors(tuple(tensor.clone() if name in written else tensor for name, tensor in pairs))

    def run(self) -> Any:
        """Return what the op makes."""
        args, kwargs = self.unshared().arguments()
        return self.op(*args, **kwargs)


def _look(leaf: Leaf) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return type(leaf).__name__, leaf


def coarsest(tensors: tuple[Tensor, ...]) -> torch.dtype:
    """Return the least exact dtype of real numbers, or of parts of complex ones; float64 where there are none."""
    kinds = [tensor.dtype.to_real() for tensor in tensors if carries_gradient(tensor.dtype)]
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float64)
