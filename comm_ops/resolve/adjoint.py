"""The adjoint of a call, read off the op's own record: nothing runs, no process group is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.torch_private import TorchDispatchMode, schema
from hetu_fx.comm_ops.ops.table import COMM_OPS, FUSED_OPS
from hetu_fx.comm_ops.resolve.resolution import OpCall


class _Recorder(TorchDispatchMode):
    """Writes down calls of hetu ops instead of making them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OpCall] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, _, name = schema(func).name.partition("::")
        if namespace != "hetu":
            return func(*args, **(kwargs or {}))
        self.calls.append(OpCall(name, args[1:]))
        result: Tensor = args[0].clone()
        return result


def adjoint_calls(call: OpCall) -> tuple[OpCall, ...]:
    """Give the calls that take the gradient of the call's result to that of its input; none: it passes as it is.

    Of an op that computes too, only the name of the one that its backward runs is told.
    """
    if call.op in FUSED_OPS:
        name = FUSED_OPS[call.op].backward_op
        return () if name is None else (OpCall(name, ()),)
    with torch.no_grad(), _Recorder() as recorder:
        COMM_OPS[call.op].adjoint(torch.empty(0), *call.args)
    return tuple(recorder.calls)
