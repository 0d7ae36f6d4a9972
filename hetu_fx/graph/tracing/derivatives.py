"""Derivatives that a forward takes of its own values (forces of an energy): a trace sees the ops of the backward.

A trace has composite ops whole, as the model calls them. Their backwards read what is made inside of them, of which the
trace knows nothing; so where a forward takes a derivative, all composites are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.torch_private import (
    GRAD_AND_VALUE,
    TorchDispatchMode,
    give_name_in_trace,
    instead_of_grad_and_value,
    is_between_ops,
    is_in_trace,
    transform_level,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
    without_composites,
)

_DETACH = torch.ops.aten.detach.default


class DerivativeTaken(BaseException):
    """A forward takes a derivative, and the trace has composite ops whole. No forward catches this."""


@contextmanager
def transforms_as_derivatives() -> Iterator[None]:
    """Let torch.func.grad and grad_and_value take derivatives by torch.autograd.grad, outside of other transforms."""
    with instead_of_grad_and_value(_grad_and_value):
        yield


def _grad_and_value(
    function: Callable[..., Any],
    numbers: int | tuple[int, ...],
    has_more: bool,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, Any]:
    if transform_level() is not None:  # of vmap, say: what is inside has other dims than it shows
        return GRAD_AND_VALUE(function, numbers, has_more, args, kwargs)
    with torch.enable_grad():
        given = list(args)
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            given[number] = tree_map_only(Tensor, _differentiable, given[number])
        made = function(*given, **kwargs)
        by = given[numbers] if isinstance(numbers, int) else tuple(given[number] for number in numbers)
        leaves, form = tree_flatten(by)
        found = torch.autograd.grad(made[0] if has_more else made, leaves, create_graph=True, materialize_grads=True)
    return tree_unflatten(found, form), made


def _differentiable(given: Tensor) -> Tensor:
    """Return a tensor by which can be differentiated, as another one than is given."""
    return given.view_as(given) if given.requires_grad else given.detach().requires_grad_()


@dataclass(frozen=True, eq=False)
class _Detached:
    """A detached tensor, which is kept so that its number stays its own.

    Attributes:
        made: the tensor.
        source: what it was detached from.
        is_autograds: by autograd alone, and not by the forward. Of what is made inside of an op it is not known.
    """

    made: Tensor
    source: Tensor
    is_autograds: bool


class Derivatives(TorchDispatchMode):
    """Lets the trace under way see what derivatives are made of.

    Autograd keeps an op's result detached, as it would keep itself, and a backward has it detached once more: both are
    the result.
    """

    supports_higher_order_operators = True  # which detach nothing

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, _Detached] = {}  # by the number of what was made
        self._is_in_backward = False

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Let a trace see them inside."""
        with without_composites(), self:
            yield

    def taken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do what torch.autograd.grad does, by ops that a trace sees and differentiates.

        Where the caller wants no graph of the gradients, they are detached from it: the ops are the same.
        """
        self._is_in_backward = True
        try:
            made = torch.autograd.grad(*args, **{**kwargs, "create_graph": True, "retain_graph": True})
        finally:
            self._is_in_backward = False
        wants_graph = kwargs.get("create_graph", False)
        return made if wants_graph else tree_map_only(Tensor, Tensor.detach, made)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if op is not _DETACH:
            return op(*args, **dict(kwargs or {}))
        is_autograds = is_between_ops()  # what a forward detaches comes here from inside of that op
        if self._is_in_backward and is_autograds:
            self._name(args[0])
        made = op(*args)
        self._sources[id(made)] = _Detached(made, args[0], is_autograds)
        if self._is_in_backward and is_autograds:
            self._name(made)
        return made

    def _name(self, tensor: Tensor) -> None:
        """Let a tensor be what autograd has detached it from."""
        source = tensor
        while (known := self._sources.get(id(source))) and (known.is_autograds or not is_in_trace(source)):
            source = known.source
        if is_in_trace(source):
            give_name_in_trace(tensor, source)
