"""A model as trials make it anew, small: its structure, its buffers, and a few numbers of each parameter.

What is kept takes little memory, so that plans which are made while training goes on can be tried when no process has
the whole model any longer. The numbers are like the model's: a few of each parameter's own, again and again. Where they
are all alike (a norm's weights, a bias of zeros), each is moved a little, as ones and zeros hide what is lost.

Tables of embeddings, and what is as wide as they are long, are made short: a vocabulary takes most of a small model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.base.device_types import HOST
from hetu_fx.base.dtypes import carries_gradient, is_complex, is_real
from hetu_fx.base.torch_private import buffer_slots, parameter_slots
from hetu_fx.errors import StateError
from hetu_fx.switching.home.tensor import has_piece

_LENGTHS = (509, 521)
"""Primes: rows of a parameter that is written from so many numbers are not alike, unless they are as long."""

_MOVED = 0.05
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}
LONG = 1024
"""Tables of more rows are shortened."""

_SHORT = 128
_ODD = 64  # what is left of the division by it stays, so that shards stay uneven


@dataclass(frozen=True)
class Narrowing:
    """Sizes of a model that become smaller: `sizes` has the new ones by the old ones."""

    sizes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Narrowing:
        """Choose the sizes of a model's long tables."""
        tables = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
        return cls({rows: _SHORT + rows % _ODD for rows in tables if rows > LONG})

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape with the new sizes."""
        return tuple(map(self.size, shape))

    def size(self, number: Any) -> Any:
        """Return a size as it becomes; anything else as it is."""
        return self.sizes.get(number, number) if type(number) is int else number

    def buffer(self, buffer: Tensor) -> Tensor:
        """Return the first part of a buffer, in the new sizes."""
        return buffer[tuple(slice(0, size) for size in self.shape(tuple(buffer.shape)))]

    def apply(self, model: nn.Module) -> None:
        """Let a model's attributes, and those of what configures it, say the new sizes."""
        for space in _spaces(model) if self.sizes else ():
            for key, value in space.items():
                if type(value) is int and value in self.sizes:
                    space[key] = self.sizes[value]

    def numbers(self, tensor: Tensor) -> Tensor:
        """Return whole numbers of an input, such as index the tables, below the new sizes."""
        if carries_gradient(tensor.dtype) or not tensor.numel():
            return tensor
        largest = int(tensor.max())
        fitting = [new for old, new in sorted(self.sizes.items()) if new <= largest < old]
        return tensor.where(tensor < 0, tensor % fitting[0]) if fitting else tensor


def _spaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of modules, and of other objects that they hold."""
    seen: set[int] = set()
    for module in model.modules():
        yield vars(module)
        for value in vars(module).values():
            if hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and id(value) not in seen:
                seen.add(id(value))
                yield vars(value)


@dataclass(frozen=True, eq=False)
class ModelTemplate:
    """What models like one are made of.

    Attributes:
        model: the model's structure; its parameters have no values, its buffers have theirs.
        loss_fn: what makes the loss, copied with it.
        numbers: of each parameter, by its first name.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    numbers: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Callable[..., Any] | None) -> ModelTemplate:
        """Take the template of a model, which is left as it is.

        Raises:
            StateError: the model cannot be copied.
        """
        parameters = dict(model.named_parameters())
        tensors = [*model.buffers(), *_tensors_of(loss_fn)]
        memo: dict[int, Any] = {id(tensor): tensor.detach().to(HOST, copy=True) for tensor in tensors}
        memo |= {id(p): _without_values(p) for p in parameters.values()}
        try:
            copied, loss = copy.deepcopy((model, loss_fn), memo)
        except Exception as error:  # whatever the parts of a module raise
            raise StateError(f"the model cannot be copied: {type(error).__name__}: {error}") from error
        return cls(copied, loss, {name: _numbers(p) for name, p in parameters.items()})

    @property
    def buffer_bytes(self) -> int:
        """Return what the buffers take."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.model.buffers())

    def made(
        self, dropped: Collection[str], narrowing: Narrowing, dtype: torch.dtype
    ) -> tuple[nn.Module, Callable[..., Any] | None]:
        """Make a model, and what makes its loss, in a floating point dtype.

        Args:
            dropped: paths of modules in lists or sequences, which are left out.
            narrowing: sizes that become smaller.
            dtype: of all real numbers.

        Raises:
            StateError: a path is not that of a module in a list or a sequence.
        """
        memo: dict[int, Any] = {}
        for container, left in _containers(self.model, dropped).items():
            _shorten(container, left, memo)
        model, loss = copy.deepcopy((self.model, self.loss_fn), memo)
        narrowing.apply(model)
        _write(model, self._left(model, memo), narrowing, dtype)
        for tensor in _tensors_of(loss):
            tensor.data = in_dtype(tensor.data, dtype)
        return model, loss

    def _left(self, made: nn.Module, memo: Mapping[int, Any]) -> dict[int, tuple[str, Tensor]]:
        """Return the first name and the numbers of every parameter of a copy, by its identity."""
        pairs = ((memo.get(id(p)), name) for name, p in self.model.named_parameters())
        return {id(copied): (name, self.numbers[name]) for copied, name in pairs if copied is not None}


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the host, with real and complex numbers in the dtype's precision."""
    if is_complex(tensor.dtype):
        return tensor.to(HOST, _COMPLEX[dtype])
    return tensor.to(HOST, dtype) if is_real(tensor.dtype) else tensor.to(HOST)


def _tensors_of(loss_fn: object) -> list[Tensor]:
    """Return the tensors that a loss module has; a function has none that can be told."""
    return [*loss_fn.parameters(), *loss_fn.buffers()] if isinstance(loss_fn, nn.Module) else []


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    empty = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _numbers(parameter: Tensor) -> Tensor:
    """Return a few of a parameter's numbers, in order, on the host; what is alike is moved a little.

    One that has no values yet is taken for zeros.
    """
    last = parameter.shape[-1] if parameter.dim() else 1
    most = next(length for length in _LENGTHS if last % length)
    if not has_piece(parameter):
        return _moved(torch.zeros(min(parameter.numel(), most), dtype=parameter.dtype))
    flat = parameter.detach().reshape(-1)
    some = flat if flat.numel() <= most else flat[:: flat.numel() // most][:most]
    return _moved(some.to(HOST, copy=True))


def _moved(numbers: Tensor) -> Tensor:
    """Return numbers, each moved a little where all are alike."""
    if not is_real(numbers.dtype) or not numbers.numel() or bool((numbers != numbers[0]).any()):
        return numbers
    source = torch.Generator().manual_seed(numbers.numel())
    noise = torch.randn(numbers.shape, generator=source, dtype=torch.float64)
    return numbers.double() + noise * _MOVED * max(abs(float(numbers[0])), 0.2)


def _containers(model: nn.Module, dropped: Collection[str]) -> dict[nn.Module, set[str]]:
    """Return what is left out of each list or sequence of modules."""
    found: dict[nn.Module, set[str]] = {}
    for path in dropped:
        parent, _, name = path.rpartition(".")
        container = model.get_submodule(parent)
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            raise StateError(f"the blocks are in {parent!r}, a {type(container).__name__}, which cannot be shortened")
        found.setdefault(container, set()).add(name)
    return found


def _shorten(container: nn.Module, left: Collection[str], memo: dict[int, Any]) -> None:
    """Have copies hold a container without some of its modules, numbered anew."""
    shorter = type(container).__new__(type(container))
    memo[id(container)] = shorter
    rest = {key: value for key, value in vars(container).items() if key != "_modules"}
    vars(shorter).update(copy.deepcopy(rest, memo))
    stay = [module for name, module in container.named_children() if name not in left]
    vars(shorter)["_modules"] = {str(number): copy.deepcopy(module, memo) for number, module in enumerate(stay)}


def _write(
    model: nn.Module, numbers: Mapping[int, tuple[str, Tensor]], narrowing: Narrowing, dtype: torch.dtype
) -> None:
    """Give a copy's parameters values, and bring its buffers into the dtype; what is tied stays so."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                _, own = numbers[id(parameter)]
                filled = _filled(in_dtype(own, dtype), narrowing.shape(parameter.shape))
                made[id(parameter)] = nn.Parameter(filled, requires_grad=parameter.requires_grad)
            parameter_slots(module)[name] = made[id(parameter)]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            buffer_slots(module)[name] = in_dtype(narrowing.buffer(buffer), dtype)


def _filled(numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that has the numbers again and again."""
    size = torch.Size(shape).numel()
    if numbers.numel() >= size:
        return numbers[:size].reshape(shape).clone()
    return numbers.repeat(-(-size // numbers.numel()))[:size].reshape(shape)
