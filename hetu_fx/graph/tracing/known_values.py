"""Values that follow from nothing that a call is given: Python may read them in a trace, as in any call.

A mask of a fixed length, or a table that is made of constants, is the same in every call. torch.export refuses
`if (mask == causal).all()` all the same, as its tensors have no values; so such tensors are computed beside the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.device_types import HOST
from hetu_fx.base.torch_private import (
    OpOverload,
    TorchDispatchMode,
    tree_leaves,
    tree_map,
    untraced,
    written_names,
)
from hetu_fx.graph.calls import bound, is_random_op, is_unset_op
from hetu_fx.graph.meta import SYMBOLIC, storages_of

aten = torch.ops.aten

MOST_ELEMENTS = 2**22
"""In all that is computed for one trace: masks and tables, of which there are few, not what is computed with."""
_READS = aten._local_scalar_dense.default
_UNKNOWN = object()


class KnownValues(TorchDispatchMode):
    """Computes each op of which all tensors are known, and nothing is a size of the batch, a random number or unset."""

    supports_higher_order_operators = True  # which are never known

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By the number of the traced tensor, which is kept so that its number stays its own.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self._elements = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if not isinstance(op, OpOverload):
            return op(*args, **named)
        known = self._is_known(op, tree_leaves((args, named)))
        if op is _READS and known:
            return self._computed(op, args, named)
        traced = op(*args, **named)
        made = _tensors(traced)
        value = self._computed(op, args, named) if known and self._are_few(made) else _UNKNOWN
        if value is _UNKNOWN:
            self._forget_written(op, args, named)
        else:
            self._known.update(
                (id(one), pair) for one, pair in zip(made, zip(made, _tensors(value), strict=True), strict=True)
            )
        return traced

    def _is_known(self, op: OpOverload[..., Any], leaves: Iterable[Any]) -> bool:
        if op.namespace != "aten" or is_unset_op(op) or is_random_op(op):
            return False
        return all(map(self._is_constant, leaves))

    def _is_constant(self, leaf: Any) -> bool:
        if isinstance(leaf, Tensor):
            return id(leaf) in self._known
        if isinstance(leaf, torch.device):
            return leaf == HOST
        return not isinstance(leaf, SYMBOLIC)

    def _computed(self, op: OpOverload[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        args, named = tree_map(self._value, (args, named))
        with untraced(), torch.no_grad():
            try:
                return op(*args, **named)
            except (RuntimeError, IndexError, ValueError, TypeError):  # the trace says so itself, with the line
                return _UNKNOWN

    def _value(self, leaf: Any) -> Any:
        return self._known[id(leaf)][1] if isinstance(leaf, Tensor) else leaf

    def _are_few(self, made: list[Tensor]) -> bool:
        """Tell whether there is room for more tensors, before memory is taken for them."""
        sizes = [one.numel() for one in made if id(one) not in self._known]
        if any(isinstance(size, SYMBOLIC) for size in sizes):
            return False
        self._elements += sum(sizes)
        return self._elements <= MOST_ELEMENTS

    def _forget_written(self, op: OpOverload[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Forget what an op has written to, and all that lies in the same memory, whichever view of it was written."""
        given = bound(op, args, named)
        places = storages_of(_tensors([given[name] for name in written_names(op)]))
        self._known = {number: pair for number, pair in self._known.items() if places.isdisjoint(storages_of(pair[0]))}


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
