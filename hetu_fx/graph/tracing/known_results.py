"""What ops on fake tensors have given in a trace: the same op on values of the same form gives the same form again.

Most of a trace is spent on it. With symbolic sizes torch works out every result in Python, by hundreds of steps for one
op, and does so anew for each block of a model. What it keeps itself if asked makes each result twice, at that price.

An answer holds while nothing more is found out of sizes: what is found out next makes all be worked out once more, so
that a result, and the guards that it leads to, are those of a trace that remembers nothing. A result shares the memory
of the argument that it shared it with, and has of its sizes those that are an argument's, as the trace names sizes by
what they were read from.

Functions of torch, and `len`, which a trace has another form of: one that leaves sizes open and reads no numbers.

- `len(x)` of a tensor, of which Python makes an int, and chunks of a size that is a multiple of their number, which
  torch counts: both fix a size that a trace could leave open.
- Batch norms that average their statistics over all batches (`momentum=None`) weigh each by one over their number,
  which torch reads as a Python float; here it stays a tensor.
- `torch.distributions` asks whether a covariance is symmetric, and only then whether it is positive definite: a trace
  would have to go on either way. All is asked here, and the answer is the same.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sympy
import torch
from torch import SymInt, Tensor
from torch.distributions import constraints
from torch.nn import functional as F

from hetu_fx.base.torch_private import (
    BatchNorm,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    SymNode,
    check_input_of_norm,
    copied_size,
    dispatching_by,
    fake_of_form,
    is_told_by_values,
    is_traced_by_proxies,
    keys_of_kernels,
    schema,
    statically_known_true,
    storage_key,
    version_of_sizes,
)

_LEN, _CHUNK, _NORM = builtins.len, torch.chunk, BatchNorm.forward


def _length(value: Any, /) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else _LEN(value)


def _chunks(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    size = input.shape[dim]
    if isinstance(size, int) or not statically_known_true(size % chunks == 0):
        return _CHUNK(input, chunks, dim)
    part = size // chunks
    return tuple(input.narrow(dim, number * part, part) for number in range(chunks))


def _norm(norm: BatchNorm, x: Tensor) -> Tensor:
    batches, mean, variance = norm.num_batches_tracked, norm.running_mean, norm.running_var
    averages = norm.momentum is None and norm.training and norm.track_running_stats
    if not averages or batches is None or mean is None or variance is None:
        return _NORM(norm, x)
    check_input_of_norm(norm, x)
    batches.add_(1)
    of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
    normed = F.batch_norm(x, *of_batch, norm.weight, norm.bias, True, 1.0, norm.eps)  # writes those of this batch
    for running, new in zip((mean, variance), of_batch, strict=True):
        weight = batches.to(torch.promote_types(running.dtype, torch.float32)).reciprocal()
        running.copy_(running * (1 - weight) + new * weight)
    return normed


def _is_symmetric(_: Any, matrices: Tensor) -> Tensor:
    if not _are_square(matrices):
        return torch.zeros(matrices.shape[:-2], dtype=torch.bool, device=matrices.device)
    return torch.isclose(matrices, matrices.mT, atol=1e-6).all(-2).all(-1)


def _is_positive_semidefinite(_: Any, matrices: Tensor) -> Tensor:
    found = _is_symmetric(_, matrices)
    return found & torch.linalg.eigvalsh(matrices).ge(0).all(-1) if _are_square(matrices) else found


def _is_positive_definite(_: Any, matrices: Tensor) -> Tensor:
    found = _is_symmetric(_, matrices)
    return found & torch.linalg.cholesky_ex(matrices).info.eq(0) if _are_square(matrices) else found


def _are_square(matrices: Tensor) -> bool:
    return matrices.shape[-2] == matrices.shape[-1]


_LENGTHS = ((builtins, "len", _length), (torch, "chunk", _chunks), (Tensor, "chunk", _chunks))
_ALWAYS = (
    (BatchNorm, "forward", _norm),
    (type(constraints.symmetric), "check", _is_symmetric),
    (type(constraints.positive_semidefinite), "check", _is_positive_semidefinite),
    (type(constraints.positive_definite), "check", _is_positive_definite),
)


def open_lengths() -> AbstractContextManager[None]:
    """Let the built-in `len` return the size that a tensor has in its first dim, symbolic where that is; chunks too."""
    return _instead(_LENGTHS)


def without_numbers() -> AbstractContextManager[None]:
    """Let batch norms whose momentum is None, and constraints on matrices, read no numbers; all others are as ever."""
    return _instead(_ALWAYS)


@contextmanager
def _instead(functions: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for holder, name, function in functions:
            stack.enter_context(mock.patch.object(holder, name, function))
        yield


Op = Any  # an op of torch, or what else a mode is given

_SPACES = ("aten", "prims")
_OF_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_RESULTS = ("Tensor", "List[Tensor]")
_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _NotKnown(Exception):
    """An op, an argument or a result is not of the kind that is remembered."""


@dataclass(frozen=True, slots=True)
class _GivenSize:
    """Which size of the arguments a size of a result is."""

    number: int


_Size = int | _GivenSize | SymNode


@dataclass(frozen=True, slots=True)
class _Form:
    """Of a result: `shares` is the argument whose memory it has, None for memory of its own, of so many `bytes`."""

    sizes: tuple[_Size, ...]
    strides: tuple[_Size, ...]
    offset: _Size
    bytes: _Size
    dtype: torch.dtype
    device: torch.device
    shares: int | None


class _GivenForms:
    """What tells arguments of an op apart; their tensors, and their symbolic sizes, which of them are one and the same.

    Raises:
        _NotKnown: a result may depend on more than what is told.
    """

    def __init__(self, mode: FakeTensorMode, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.mode, self.tensors = mode, list[Tensor]()
        self.sizes: dict[SymNode, int] = {}
        self._told: list[Any] = [
            op,
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        ]
        self._tell_all(args)
        self._tell_all(tuple(kwargs.items()))
        self.key = tuple(self._told)

    def _tell_all(self, values: Sequence[Any]) -> None:
        self._told += (len(values), type(values))
        for value in values:
            if isinstance(value, Tensor):
                self._tell_tensor(value)
            elif isinstance(value, SymInt):
                self._tell_size(value)
            elif isinstance(value, list | tuple):
                self._tell_all(value)
            elif isinstance(value, _PLAIN):
                self._told += (type(value), value)
            else:
                raise _NotKnown

    def _tell_tensor(self, tensor: Tensor) -> None:
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self.mode or not _is_plain(tensor):
            raise _NotKnown
        self.tensors.append(tensor)
        self._told += (tensor.dtype, tensor.device, tensor.requires_grad, tensor.dim())
        for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()):
            self._tell_size(size)

    def _tell_size(self, size: int | SymInt) -> None:
        if isinstance(size, int):
            self._told.append(size)
            return
        known = self.sizes.get(size.node)
        if known is not None:
            self._told += (_GivenSize, known)
            return
        self.sizes[size.node] = len(self.sizes)
        expression = size.node.expr
        if any(map(is_told_by_values, expression.free_symbols)):
            raise _NotKnown
        self._told += (SymInt, expression)

    def form(self, result: Any) -> _Form:
        """Return the form of a result; `_NotKnown` where another one like it cannot be made."""
        if not isinstance(result, FakeTensor) or result.requires_grad or not _is_plain(result):
            raise _NotKnown
        if any(result is tensor for tensor in self.tensors):
            raise _NotKnown
        storage = _memory(result)
        sharing = [place for place, one in enumerate(self.tensors) if _memory(one) == storage]
        if len(sharing) > 1:
            raise _NotKnown
        return _Form(
            sizes=tuple(map(self._size, result.shape)),
            strides=tuple(map(self._size, result.stride())),
            offset=self._size(result.storage_offset()),
            bytes=self._size(result.untyped_storage().nbytes()),
            dtype=result.dtype,
            device=result.device,
            shares=sharing[0] if sharing else None,
        )

    def _size(self, size: int | SymInt) -> _Size:
        if isinstance(size, int):
            return size
        number = self.sizes.get(size.node)
        if number is not None:
            return _GivenSize(number)
        if not size.node.expr.free_symbols <= self._symbols():
            raise _NotKnown
        node: SymNode = size.node
        return node

    def _symbols(self) -> set[sympy.Symbol]:
        return {symbol for node in self.sizes for symbol in node.expr.free_symbols}

    def made(self, form: _Form) -> Tensor:
        """Return a tensor of a form."""
        given = tuple(self.sizes)

        def size(of: _Size) -> int | SymInt:
            if isinstance(of, int):
                return of
            return SymInt(given[of.number] if isinstance(of, _GivenSize) else copied_size(of))

        sizes, strides = tuple(map(size, form.sizes)), tuple(map(size, form.strides))
        shared = size(form.bytes) if form.shares is None else self.tensors[form.shares]
        return fake_of_form(self.mode, sizes, strides, size(form.offset), form.dtype, form.device, shared)


def _memory(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _is_plain(tensor: FakeTensor) -> bool:
    return (
        tensor.constant is None
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


class _KnownResults:
    """What ops of a mode have given; the type of several results, None for one, and their forms."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self.work_out = mode, mode.dispatch
        self._known: dict[tuple[Any, ...], tuple[type | None, tuple[_Form, ...]]] = {}
        self._version, self._is_inside = -1, False
        self._remembered: dict[Op, bool] = {}

    def dispatch(self, op: Op, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return what an op gives, as the mode does."""
        kwargs = kwargs or {}
        if self._is_inside or not self._is_remembered(op) or is_traced_by_proxies():
            return self.work_out(op, types, args, kwargs)
        try:
            given = _GivenForms(self.mode, op, args, kwargs)
        except _NotKnown:
            return self.work_out(op, types, args, kwargs)
        self._forget_old()
        known = self._known.get(given.key)
        if known is not None:
            kind, forms = known
            made = list(map(given.made, forms))
            return made[0] if kind is None else kind(made)
        self._is_inside = True
        try:
            result = self.work_out(op, types, args, kwargs)
        finally:
            self._is_inside = False
        self._forget_old()
        self._remember(given, result)
        return result

    def _is_remembered(self, op: Op) -> bool:
        """Tell whether results of an op follow from the forms of its arguments."""
        found = self._remembered.get(op)
        if found is None:
            found = self._remembered[op] = (
                isinstance(op, OpOverload)
                and op.namespace in _SPACES
                and not schema(op).is_mutable
                and not any(tag in op.tags for tag in _OF_VALUES)
                and bool(schema(op).returns)  # what gives nothing checks sizes, or says what is known of them
                and all(str(returned.type) in _RESULTS for returned in schema(op).returns)
            )
        return found

    def _forget_old(self) -> None:
        version = version_of_sizes(self.mode)
        if version != self._version:
            self._known.clear()
            self._version = version

    def _remember(self, given: _GivenForms, result: Any) -> None:
        kind = None if isinstance(result, Tensor) else list if isinstance(result, list) else tuple
        results = (result,) if kind is None else tuple(result)
        try:
            forms = tuple(map(given.form, results))
        except _NotKnown:
            return
        own = [_memory(one) for one, form in zip(results, forms, strict=True) if form.shares is None]
        made = [keys_of_kernels(given.made(form)) for form in forms]
        if len(set(own)) == len(own) and made == list(map(keys_of_kernels, results)):
            self._known[given.key] = kind, forms


@contextmanager
def known_results(mode: FakeTensorMode | None) -> Iterator[None]:
    """Let a mode remember what ops give; None: nothing is traced."""
    if mode is None or mode.shape_env is None:
        yield
        return
    with dispatching_by(mode, _KnownResults(mode).dispatch):
        yield
