"""One call of an op as a rule sees it: shapes of its tensors, and its other arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.torch_private import has_schema, schema
from hetu_fx.deduction.rules.size import Size, recorded_size
from hetu_fx.graph import meta

Shape = tuple[Size, ...]
Path = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor operand of a call.

    Attributes:
        argument: name of the op's argument it is passed for.
        path: where it stands in the call: (2,), (0, 1) inside a list, ("weight",) or ("tensors", 1) by
            keyword.
        shape: its sizes.
        source: what was passed: the fx node in a graph.
        is_bool: whether its elements are booleans.
        is_float: whether its elements are real or complex numbers with gradients.
    """

    argument: str
    path: Path
    shape: Shape
    source: Any
    is_bool: bool = False
    is_float: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op: operands in the order of the op's arguments, lists flattened, absent ones left out.

    Attributes:
        op: the op's full name, "aten.linear.default".
        operands: the tensor operands.
        results: the shapes of the tensor results.
        arguments: every argument by name, defaults filled in; tensors are whatever was passed for them.
        paths: where each given argument stands.
        tensor_names: the arguments that take tensors, in order.
        where: the user's source line, for messages.
        routed: whether the row analysis found that rows are permuted, or counted, inside a shard (see
            `row_order`).
        pointers: operands whose values are positions of rows inside the shard.
        result_float: whether the results are real or complex numbers with gradients.
        result_bool: whether a result is one of booleans, which no sum becomes part by part.
    """

    op: str
    operands: tuple[Operand, ...]
    results: tuple[Shape, ...]
    arguments: Mapping[str, Any]
    paths: Mapping[str, Path]
    tensor_names: tuple[str, ...]
    where: str = "unknown line"
    routed: bool = False
    pointers: frozenset[int] = frozenset()
    result_float: bool = True
    result_bool: bool = False

    def shape(self, argument: str) -> Shape | None:
        """Return the shape of the operand passed for a tensor argument, or None if it is absent."""
        position = self.position(argument)
        return None if position is None else self.operands[position].shape

    def position(self, argument: str) -> int | None:
        """Return the position of the operand passed for a tensor argument, or None if it is absent."""
        for position, operand in enumerate(self.operands):
            if operand.argument == argument:
                return position
        return None

    @property
    def rank(self) -> int:
        """Return how many dims the first operand has."""
        return len(self.operands[0].shape)

    def integer(self, argument: str, default: int = 0) -> int:
        """Return a fixed integer argument, `default` if it is absent or None."""
        value = self.arguments.get(argument)
        return default if value is None else int(value)

    def dim(self, argument: str = "dim", rank: int | None = None, default: int = 0) -> int:
        """Return a dim argument counted from the front, of the first operand if no rank is given."""
        return self.integer(argument, default) % max(self.rank if rank is None else rank, 1)

    def dims(self, argument: str = "dim", rank: int | None = None) -> tuple[int, ...]:
        """Return a list-of-dims argument counted from the front; all dims if it is absent, None or empty."""
        value = self.arguments.get(argument)
        given = [value] if isinstance(value, int) else value
        count = self.rank if rank is None else rank
        return tuple(dim % max(count, 1) for dim in given) if given else tuple(range(count))

    def at(self, argument: str, element: int | None = None) -> Path:
        """Return the path of an argument, or of an element of a list argument."""
        path = self.paths.get(argument, (argument,))
        return path if element is None else (*path, element)


def read_call(node: fx.Node) -> Call:
    """Return the call that a call_function node makes."""
    example = meta.value(node)
    return make_call(
        node.target,
        node.args,
        dict(node.kwargs),
        example,
        _example_of,
        where=meta.source_line(node),
    )


def make_call(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    tensor_of: Callable[[Any], torch.Tensor | None],
    where: str = "unknown line",
) -> Call:
    """Return the call of `target`; `tensor_of` gives the tensor that was passed, None for others."""
    arguments, paths = _bind(target, args, kwargs)
    operands: list[Operand] = []
    for name, passed in arguments.items():
        path = paths.get(name, (name,))
        for place, item in _tensors_in(passed, path, tensor_of):
            tensor = tensor_of(item)
            assert tensor is not None
            operands.append(_operand(name, place, tensor, item))
    results = tuple(tensor for tensor in _flat(result) if isinstance(tensor, torch.Tensor))
    return Call(
        op=str(target),
        operands=tuple(operands),
        results=tuple(_shape(tensor) for tensor in results),
        arguments=arguments,
        paths=paths,
        tensor_names=_tensor_names(target, arguments),
        where=where,
        result_float=all(carries_gradient(tensor.dtype) for tensor in results),
        result_bool=any(tensor.dtype is torch.bool for tensor in results),
    )


def _operand(name: str, path: Path, tensor: torch.Tensor, source: Any) -> Operand:
    is_bool, is_float = tensor.dtype is torch.bool, carries_gradient(tensor.dtype)
    return Operand(name, path, _shape(tensor), source, is_bool, is_float)


def _shape(tensor: torch.Tensor) -> Shape:
    return tuple(recorded_size(size) for size in tensor.shape)


def _example_of(passed: Any) -> torch.Tensor | None:
    example = meta.value(passed) if isinstance(passed, fx.Node) and meta.has_value(passed) else None
    return example if isinstance(example, torch.Tensor) else None


def _flat(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _tensors_in(passed: Any, path: Path, tensor_of: Callable[[Any], torch.Tensor | None]) -> list[tuple[Path, Any]]:
    if isinstance(passed, tuple | list):
        return [pair for i, item in enumerate(passed) for pair in _tensors_in(item, (*path, i), tensor_of)]
    return [] if tensor_of(passed) is None else [(path, passed)]


@cache
def _signature(target: Any) -> tuple[tuple[str, Any, bool], ...] | None:
    """Return (name, default, takes tensors) of each argument, or None for a target without a schema."""
    if not has_schema(target):
        return None
    return tuple((arg.name, arg.default_value, "Tensor" in str(arg.type)) for arg in schema(target).arguments)


def _bind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return arguments and paths by name; without a schema, positional ones are "0", "1", ..."""
    signature = _signature(target) or tuple((str(i), None, True) for i in range(len(args)))
    arguments: dict[str, Any] = {name: default for name, default, _ in signature}
    paths: dict[str, Path] = {}
    for index, ((name, *_), value) in enumerate(zip(signature, args, strict=False)):
        arguments[name], paths[name] = value, (index,)
    for name, value in kwargs.items():
        arguments[name], paths[name] = value, (name,)
    return arguments, paths


def _tensor_names(target: Any, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    signature = _signature(target)
    return tuple(arguments) if signature is None else tuple(name for name, _, tensor in signature if tensor)


def entries(value: Any, path: Path = ()) -> Iterator[tuple[Path, fx.Node]]:
    """Yield the nodes among a call's arguments with their places: in `args` by number, in `kwargs` by name."""
    if isinstance(value, fx.Node):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from entries(item, (*path, name))
    elif isinstance(value, tuple | list):
        for position, item in enumerate(value):
            yield from entries(item, (*path, position))


def call_argument(node: fx.Node, path: Path) -> Any:
    """Return what stands at a place of a call."""
    return call_entry({"args": node.args, "kwargs": node.kwargs}, path)


def _holder_of(call: dict[str, Any], path: Path) -> tuple[Any, Any]:
    """Return the container of a place in a call's `args` and `kwargs`, and the place's index or key in it."""
    first, *rest = path
    holder, key = (call["args"], first) if isinstance(first, int) else (call["kwargs"], first)
    for step in rest:
        holder, key = holder[key], step
    return holder, key


def call_entry(call: dict[str, Any], path: Path) -> Any:
    """Return what stands at a place in a call's `args` and `kwargs`."""
    holder, key = _holder_of(call, path)
    return holder[key]


def mutable_copy(value: Any) -> Any:
    """Copy nested arguments into lists and dicts that can be changed."""
    if isinstance(value, list | tuple):
        return [mutable_copy(item) for item in value]
    if isinstance(value, Mapping):
        return {key: mutable_copy(item) for key, item in value.items()}
    return value


def set_entry(call: dict[str, Any], path: Path, value: Any) -> None:
    """Put a value at a place in a call's thawed `args` and `kwargs`."""
    holder, key = _holder_of(call, path)
    holder[key] = value
