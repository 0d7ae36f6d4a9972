"""What Python may read of tensors in a trace, in which they have no values.

What follows from nothing that a call is given (a mask of a fixed length, a table that is made of constants) is the same
in every call. torch.export refuses `if (mask == causal).all()` all the same; so such tensors are computed beside the
trace. Where Python asks of other numbers, the tensors that hold them answer in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor

from hetu_fx.base.device_types import HOST
from hetu_fx.base.dtypes import is_real
from hetu_fx.base.torch_private import (
    OpOverload,
    TorchDispatchMode,
    argument_names,
    suspend_trace,
    tree_leaves,
    tree_map_only,
    version,
)
from hetu_fx.errors import CaptureError
from hetu_fx.graph.calls import bound, is_random_op, is_unset_op
from hetu_fx.graph.meta import SYMBOLIC, example_storages

aten = torch.ops.aten

MOST_ELEMENTS = 2**22
"""In all that is computed for one trace: masks and tables, of which there are few, not what is computed with."""
_READ = aten._local_scalar_dense.default
_UNKNOWN = object()
_OF_ALL = (aten.all, aten._is_all_true)
_RELATIONS: Mapping[Any, Callable[[Any, Any], Tensor]] = {
    sympy.Ge: torch.ge, sympy.Gt: torch.gt, sympy.Le: torch.le, sympy.Lt: torch.lt, sympy.Eq: torch.eq,
    sympy.Ne: torch.ne,
}  # fmt: skip


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
        if op is _READ and known:
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
        args, named = tree_map_only(Tensor, lambda one: self._known[id(one)][1], (args, named))
        with suspend_trace(), torch.no_grad():
            try:
                return op(*args, **named)
            except (RuntimeError, IndexError, ValueError, TypeError):  # the trace says so itself, with the line
                return _UNKNOWN

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
        places = example_storages(_tensors([given[name] for name in argument_names(op).written]))
        self._known = {
            number: pair for number, pair in self._known.items() if places.isdisjoint(example_storages(pair[0]))
        }


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class ReadNumbers(TorchDispatchMode):
    """Notes the tensors that a trace reads numbers from, by the symbols that stand for the numbers."""

    supports_higher_order_operators = True  # which read none

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[Any, Tensor] = {}  # of symbols, and of truth values
        self._versions: dict[int, int] = {}
        self._over_all: dict[int, Tensor] = {}  # by the number of the tensor, which is kept so that it stays its own
        self._truths: dict[Any, Tensor] = {}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = op(*args, **dict(kwargs or {}))
        if op is _READ and isinstance(made, SYMBOLIC):
            self._note(args[0], made.node.expr)
        elif isinstance(op, OpOverload) and (
            op.overloadpacket in _OF_ALL or (op is aten.ne.Scalar and id(args[0]) in self._over_all)
        ):  # which is what Python asks of a truth value over all elements, before it reads that
            self._over_all[id(made)] = made
        return made

    def _note(self, source: Tensor, expression: Any) -> None:
        self._versions[id(source)] = version(source)
        self._sources.update(dict.fromkeys(expression.free_symbols, source))
        if source.dtype is torch.bool:
            self._truths[expression] = source

    def is_over_all(self, expression: Any) -> bool:
        """Tell whether an expression is the truth value of whether all elements of a tensor are true."""
        return expression in self._truths and id(self._truths[expression]) in self._over_all

    def condition(self, expression: Any) -> Callable[[], Tensor] | None:
        """Return what makes a tensor without dims of a truth value, or of a comparison of two numbers.

        None where an expression is anything else, or what it compares was not read. The tensor is to be made at the end
        of the trace, in which it is; CaptureError then where one that was read has been written to since.
        """
        if expression in self._truths:
            return lambda: self._as_read(self._truths[expression])
        sides = expression.args
        if type(expression) not in _RELATIONS or not all(side.is_number or side in self._sources for side in sides):
            return None
        return lambda: self._compared(expression.reversed if sides[0].is_number else expression)

    def _compared(self, relation: Any) -> Tensor:
        """Compare numbers in double precision, as Python does; whole ones as they are."""
        read = {side: self._as_read(self._sources[side]) for side in relation.args if not side.is_number}
        is_whole = all(side.is_Integer for side in relation.args if side not in read) and not any(
            is_real(one.dtype) for one in read.values()
        )
        number, dtype = (int, torch.int64) if is_whole else (float, torch.float64)
        sides = (read[side].to(dtype) if side in read else number(side) for side in relation.args)
        return _RELATIONS[type(relation)](*sides)

    def _as_read(self, source: Tensor) -> Tensor:
        if version(source) != self._versions[id(source)]:
            raise CaptureError(
                "the forward writes to a tensor after it has read a number from it, by which it may raise\n"
                "hint: write to a copy of it (`.clone()`)"
            )
        return source.reshape(()) if source.dim() else source
