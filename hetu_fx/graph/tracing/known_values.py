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
from hetu_fx.graph.calls import bound, is_random_op

aten = torch.ops.aten

MOST_ELEMENTS = 2**22
"""In all that is computed for one trace: masks and tables, of which there are few, not what is computed with."""
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_UNSET = (aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided)
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
        leaves = tree_leaves((args, named))
        value = self._computed(op, args, named) if self._is_known(op, leaves) else _UNKNOWN
        if op is _READS and value is not _UNKNOWN:
            return value
        traced = op(*args, **named)
        if value is _UNKNOWN:
            self._forget_written(op, args, named)
        else:
            self._remember(tree_leaves(traced), tree_leaves(value))
        return traced

    def _is_known(self, op: OpOverload[..., Any], leaves: Iterable[Any]) -> bool:
        if op.namespace != "aten" or op.overloadpacket in _UNSET or is_random_op(op):
            return False
        return all(map(self._is_constant, leaves))

    def _is_constant(self, leaf: Any) -> bool:
        if isinstance(leaf, Tensor):
            return id(leaf) in self._known
        if isinstance(leaf, torch.device):
            return leaf == HOST
        return not isinstance(leaf, _SYMBOLS)

    def _computed(self, op: OpOverload[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        args, named = tree_map(self._value, (args, named))
        with untraced(), torch.no_grad():
            try:
                return op(*args, **named)
            except (RuntimeError, IndexError, ValueError, TypeError):  # the trace says so itself, with the line
                return _UNKNOWN

    def _value(self, leaf: Any) -> Any:
        return self._known[id(leaf)][1] if isinstance(leaf, Tensor) else leaf

    def _remember(self, traced: list[Any], values: list[Any]) -> None:
        for one, value in zip(traced, values, strict=True):
            if not isinstance(one, Tensor) or value.device != HOST:
                continue
            if id(one) not in self._known:
                self._elements += value.numel()
            if self._elements <= MOST_ELEMENTS:
                self._known[id(one)] = (one, value)

    def _forget_written(self, op: OpOverload[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Forget what an op has written to, and all that lies in the same memory."""
        given = bound(op, args, named)
        written = [leaf for name in written_names(op) for leaf in tree_leaves(given[name]) if id(leaf) in self._known]
        places = {self._value(leaf).untyped_storage().data_ptr() for leaf in written}
        self._known = {
            number: (traced, value)
            for number, (traced, value) in self._known.items()
            if value.untyped_storage().data_ptr() not in places
        }
