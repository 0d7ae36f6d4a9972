"""A way to run an op: in a dtype, on a device, compiled, or with some ops replaced. A further kind is a row of WAYS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from hetu_fx.base.device_types import CPU, CUDA
from hetu_fx.base.documents import nearest
from hetu_fx.base.dtypes import is_real
from hetu_fx.errors import AlignError
from hetu_fx_align.call import Call

Replacement = Callable[..., Any]
"""Called as replacement(op, *args, **kwargs) in the place of an op."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Way:
    """How ops are run.

    Attributes:
        name: of the way, in tables.
        dtype: what tensors of real numbers are cast to before each op; None: they stay as they are.
        device: where ops run; None: where the model is.
        backend: what torch.compile compiles each op with; "": it runs eagerly.
        replaced: by names of ops, such as aten.linear.default, what runs in their place.
    """

    name: str
    dtype: torch.dtype | None = None
    device: str | None = None
    backend: str = ""
    replaced: Mapping[str, Replacement] = field(default_factory=dict)

    def adapt_call(self, call: Call) -> Call:
        """Return a call with its tensors as this way takes them; numbers beyond its dtype become the largest it has."""
        return call if self.dtype is None and self.device is None else call.mapped(self.tensor, self._number)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor as this way takes it; complex numbers stay as they are, as under autocast."""
        kind = self.dtype if is_real(tensor.dtype) else None
        return tensor.to(device=self.device or tensor.device, dtype=kind or tensor.dtype)

    def _number(self, number: float) -> float:
        if self.dtype is None or abs(number) == float("inf"):
            return number
        most = torch.finfo(self.dtype).max
        return min(max(number, -most), most)


WAYS: Mapping[str, Way] = {
    "eager": Way("eager"),
    "inductor": Way("inductor", backend="inductor"),
    "aot_eager": Way("aot_eager", backend="aot_eager"),
    **{name: Way(name, dtype=dtype) for name, dtype in DTYPES.items()},
    **{kind.name: Way(kind.name, device=kind.name) for kind in (CPU, CUDA)},
}


def dtype_named(name: str) -> torch.dtype:
    """Return a dtype by its short name.

    Raises:
        AlignError: it is none of DTYPES.
    """
    if name not in DTYPES:
        raise AlignError(f"dtype {name!r} is not known{nearest(name, tuple(DTYPES))}")
    return DTYPES[name]


def way_named(name: str) -> Way:
    """Return a way of the table.

    Raises:
        AlignError: there is none of that name.
    """
    if name not in WAYS:
        raise AlignError(f"there is no way {name!r} to run ops{nearest(name, tuple(WAYS))}")
    return WAYS[name]


class Runner:
    """Runs calls in a way; what is compiled is compiled when it is first called, once for each distinct call."""

    def __init__(self, way: Way) -> None:
        _check_device(way)
        self.way = way
        self._compiled: dict[str, Callable[..., Any]] = {}

    def run(self, call: Call) -> Any:
        """Return what a call makes in this way; its tensors are as the way takes them."""
        replacement = self.way.replaced.get(call.name)
        if replacement is not None:
            args, kwargs = call.unshared().arguments()
            return replacement(call.op, *args, **kwargs)
        return self._function(call)(*call.unshared().tensors) if self.way.backend else call.run()

    def _function(self, call: Call) -> Callable[..., Any]:
        if call.key not in self._compiled:
            self._compiled[call.key] = torch.compile(module_of(call), backend=self.way.backend, dynamic=False)
        return self._compiled[call.key]


def _check_device(way: Way) -> None:
    """Raise AlignError for a way on a device that this machine does not have."""
    try:
        torch.empty(0, device=way.device)
    except (RuntimeError, AssertionError) as error:
        told = str(error).strip().splitlines()[0]
        raise AlignError(f"way {way.name!r} needs the device {way.device!r}: {told}\nhint: give other ways") from error


def module_of(call: Call) -> fx.GraphModule:
    """Return a module that takes a call's tensors and makes the call; it has code of its own, so that Dynamo counts no
    recompilations."""
    graph = fx.Graph()
    inputs = iter([graph.placeholder(f"x{index}") for index in range(len(call.tensors))])
    args, kwargs = call.mapped_leaves(lambda leaf: next(inputs) if isinstance(leaf, Tensor) else leaf)
    graph.output(graph.call_function(call.op, args, dict(kwargs)))
    return fx.GraphModule(torch.nn.Module(), graph)
