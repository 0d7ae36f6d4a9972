"""What a trace reads from tensors: Python asks of numbers, and the tensors that hold them answer in every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor

from hetu_fx.base.dtypes import is_real
from hetu_fx.base.torch_private import OpOverload, TorchDispatchMode, version
from hetu_fx.errors import CaptureError
from hetu_fx.graph.meta import SYMBOLIC

aten = torch.ops.aten

_READ = aten._local_scalar_dense.default
_OF_ALL = (aten.all, aten._is_all_true)
_RELATIONS: Mapping[Any, Callable[[Any, Any], Tensor]] = {
    sympy.Ge: torch.ge, sympy.Gt: torch.gt, sympy.Le: torch.le, sympy.Lt: torch.lt, sympy.Eq: torch.eq,
    sympy.Ne: torch.ne,
}  # fmt: skip


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
        elif isinstance(op, OpOverload) and (op.overloadpacket in _OF_ALL or self._is_nonzero(op, args)):
            self._over_all[id(made)] = made
        return made

    def _is_nonzero(self, op: OpOverload[..., Any], args: tuple[Any, ...]) -> bool:
        """Tell whether an op is what Python asks of a truth value over all elements, before it reads that."""
        return op is aten.ne.Scalar and id(args[0]) in self._over_all

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
