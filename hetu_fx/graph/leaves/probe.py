"""Call a leaf on random numbers, before it is an op: what it makes, and how its sizes follow from its inputs'.

It is called with the example's sizes and with others, on several kinds of values. What differs otherwise than sizes
tell, or between two calls alike, would be wrong in some step, and is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getattr_static
from types import FunctionType, MethodType, ModuleType
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from hetu_fx.base.dtypes import carries_gradient, in_double
from hetu_fx.base.torch_private import LISTED_SLOTS, TorchDispatchMode, is_fake, tree_leaves
from hetu_fx.errors import StateError
from hetu_fx.graph import meta
from hetu_fx.graph.leaves.leaf_call import Invocation, OpaqueCall, Ran, are_alike, hold_the_same, new_name
from hetu_fx.graph.leaves.result_shapes import Form, Shapes, found_size
from hetu_fx.graph.leaves.work import CountWork, LeafWork, WorkBySize
from hetu_fx.graph.numbers import random_states
from hetu_fx.graph.tracing.contents import Inside, frozen, same

Environment = Mapping[sympy.Symbol, int]
_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9}
"""By how much values of two calls may differ, relative and absolute: sums may be added up in another order."""
_LINEAR = {**_TOLERANCES, torch.float32: 1e-3, torch.complex64: 1e-3}
"""By how much the gradient of a sum may differ from the sum of gradients, in times of the largest."""
_NEGLIGIBLE = 1e-2  # of the largest gradient
_FILLS = ("both", "ones", "zeros", "signed")
"""What whole numbers and truths are in a call: zeros and ones in turn, or all alike; numbers are positive, or not."""
_OTHERS = ((1, 1), (1, 3), (2, 0), (4, 0))
"""Sizes that are tried beside the example's: so many times that, and so much more. A forward may want even ones."""


class CannotBeLeaf(Exception):
    """A module cannot be a leaf; says why."""


class FixedSizesError(Exception):
    """A leaf cannot be called with other sizes than the example's."""


@dataclass(frozen=True, eq=False)
class LeafOperand:
    """What a leaf is given in a trace: sizes of which symbols may stand for, a dtype, and values if they are known."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    known: Tensor | None = None

    def sizes(self, environment: Environment) -> tuple[int, ...]:
        """Return the shape where symbols stand for these sizes."""
        sizes = [size.subs(environment) if isinstance(size, sympy.Expr) else size for size in self.shape]
        if any(isinstance(size, sympy.Expr) and size.free_symbols for size in sizes):
            raise CannotBeLeaf("it is given a tensor whose size only the values of a batch tell")
        return tuple(map(int, sizes))


@dataclass(frozen=True, eq=False)
class Question:
    """A call that a trace has met for the first time.

    Attributes:
        called: the module, or function.
        invocation: how it is called.
        values: what it is given, in order.
        state: its parameters and buffers.
        example: the example's sizes, by the symbols that stand for them.
        device: where it is called.
        strange: parameters and buffers of the model that are not its own.
    """

    called: Any
    invocation: Invocation
    values: tuple[LeafOperand, ...]
    state: tuple[LeafOperand, ...]
    example: Environment
    device: torch.device
    strange: Sequence[Tensor] = ()

    @property
    def num_bytes(self) -> int:
        """Return the size of what it is given, of the example's rows."""
        sizes = ((torch.Size(one.sizes(self.example)).numel(), one.dtype.itemsize) for one in self.values)
        return sum(count * each for count, each in sizes)

    def answer(self) -> OpaqueCall:
        """Return the call, with what it makes.

        Raises:
            CannotBeLeaf: no op can do what it does.
            SizesAreFixed: it takes the example's sizes alone.
        """
        before = _attributes(self._modules)
        with self._attributes_kept():
            calls = list(self._calls())
            changed = _changed(before, _attributes(self._modules))
        if any(number == _GLOBAL for number, _ in changed):
            raise CannotBeLeaf(f"it changes {', '.join(self._told(changed))}")
        left = tuple((self._modules[number], name) for number, name in changed)
        first = calls[0].ran
        written = tuple(name for name in self.invocation.buffers if any(name in one.ran.written for one in calls))
        names = (*first.tensors, *written)
        forms = tuple(str(self._form(name, calls)) for name in names)
        if not forms:
            raise CannotBeLeaf("it returns no tensor")
        name = new_name(self.invocation, self.called)
        shares = any(one.shares for one in calls)
        work = WorkBySize.of((one.shapes, one.work) for one in calls if one.fill == calls[0].fill)
        results = tuple(first.tensors)
        call = OpaqueCall(name, self.invocation, first.output, results, written, forms, left, shares, work)
        with self._attributes_kept():
            self._check_backward(call, calls[0])
        return call

    @contextmanager
    def _attributes_kept(self) -> Iterator[None]:
        """Let the modules have the attributes afterwards that they have now."""
        kept = [(vars(module), dict(vars(module))) for module in self._modules]
        try:
            yield
        finally:
            for space, attributes in kept:
                space.clear()
                space.update(attributes)

    def _check_backward(self, call: OpaqueCall, first: _Call) -> None:
        """Refuse a backward that is not linear: a rank has a part of the gradient, and parts are added up after it.

        Raises:
            CannotBeLeaf: the gradients of a sum are not the sum of gradients.
        """
        wanted = [place for place, is_trained in enumerate(self.invocation.differentiable) if is_trained]
        names = (*call.results, *call.written)
        results = [first.ran.tensors.get(name, first.ran.buffers.get(name)) for name in names]
        roots = {n: x for n, x in enumerate(results) if x is not None and carries_gradient(x.dtype)}
        if not wanted or not any(root.requires_grad for root in roots.values()):
            return
        source = torch.Generator().manual_seed(0)
        small, large = (
            {place: scale * _signed(x.shape, x.dtype, source).to(x.device) for place, x in roots.items()}
            for scale in (1, 100)
        )
        both = {place: small[place] + large[place] for place in roots}
        try:
            found = [call.gradients(first.operands, 0, cotangents, wanted) for cotangents in (small, large, both)]
        except Exception as error:  # whatever it raises for values that it was not meant for
            raise CannotBeLeaf(f"its backward cannot be tried on random numbers ({_first_line(error)})") from error
        known = {} if self.invocation.autocasts else _LINEAR  # what is cast inside is as coarse as what it is cast to
        largest = max([float(x.abs().nan_to_num(0, 0, 0).max()) for x in found[-1] if x.numel()], default=0.0)
        for one, other, sum_ in zip(*found, strict=True):  # one that is zero but for rounding is as exact as the others
            own = float(sum_.abs().nan_to_num(0, 0, 0).max()) if sum_.numel() else 0.0
            tolerance = max(own, largest * _NEGLIGIBLE) * known.get(sum_.dtype, 3e-2)
            if not torch.allclose(one + other, sum_, rtol=0, atol=tolerance, equal_nan=True):
                raise CannotBeLeaf(
                    "its backward is not linear in the gradient that it is given (a hook, or an autograd function, "
                    "clips or scales it), of which each rank has a part only"
                )

    def _told(self, attributes: Sequence[tuple[int, str]]) -> list[str]:
        """Say which attributes and globals are meant."""
        kinds = [type(module).__name__ for module in self._modules]
        return [f"global {name}" if number == _GLOBAL else f"{name} of {kinds[number]}" for number, name in attributes]

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(self.called.modules()) if isinstance(self.called, nn.Module) else ()

    def _calls(self) -> Iterator[_Call]:
        """Yield calls that are alike but for values and sizes; the first is the example's."""
        before = random_states()
        alike = list(self._of_the_example())
        if random_states() != before:
            raise CannotBeLeaf("it draws numbers of `random` or `numpy.random`, which differ on each rank")
        first = alike[0]
        self._check_first(first)
        alike += self._with_other_sizes(first.fill)
        for one in alike:
            if tuple(one.ran.tensors) != tuple(first.ran.tensors) or not are_alike(one.ran.output, first.ran.output):
                raise CannotBeLeaf("what it returns differs between two calls in more than the values of tensors")
        yield from alike

    def _of_the_example(self) -> Iterator[_Call]:
        """Yield a call for each kind of values that it takes.

        Raises:
            CannotBeLeaf: it takes none.
        """
        errors = list[Exception]()
        for fill in _FILLS:
            try:
                yield self._call(self.example, fill)
            except StateError as error:
                raise CannotBeLeaf(str(error)) from error
            except Exception as error:  # whatever it raises for values that it was not meant for
                errors.append(error)
        if len(errors) == len(_FILLS):
            raise CannotBeLeaf(f"it cannot be tried on random numbers ({_first_line(errors[0])})") from errors[0]

    def _check_first(self, first: _Call) -> None:
        """Refuse what makes something else of the same, keeps something, or reads what it is not given.

        What it leaves in attributes is none, if what was there before changes neither that nor what it makes.
        """
        again = self._call(self.example, first.fill)
        left = _attributes(self._modules)
        with _Read() as read:
            other = self._call(self.example, first.fill, seed=1)
        if any(meta.example_storages(tensor) & read.storages for tensor in self.strange):
            raise CannotBeLeaf("it reads a parameter or buffer of the model that is none of it, which may change")
        after = self._call(self.example, first.fill)
        for name, tensor in first.ran.tensors.items():
            if not all(_agree(tensor, one.ran.tensors.get(name)) for one in (again, after)):
                raise CannotBeLeaf(f"two calls on the same values make other values of its result {name or 'output'!r}")
        changed = _changed(left, _attributes(self._modules))
        if changed:
            raise CannotBeLeaf(f"it keeps state in attributes: {', '.join(self._told(changed))}")
        own = {id(tensor) for tensor in other.ran.inputs}
        strange = next((x for x in _read_by(list(other.ran.tensors.values())) if id(x) not in own), None)
        if strange is not None:
            raise CannotBeLeaf(
                f"it reads a trainable tensor of shape {tuple(strange.shape)} that is no parameter of it, and would "
                "have no gradient"
            )

    def _with_other_sizes(self, fill: str) -> list[_Call]:
        """Return two calls for each size that may change."""
        made = list[_Call]()
        for symbol in self._symbols:
            found = list(self._with_others_of(symbol, fill))
            if not found:
                raise FixedSizesError(f"leaf {self.invocation.label} takes no other size than the example's")
            made += found
        return made

    def _with_others_of(self, symbol: sympy.Symbol, fill: str) -> Iterator[_Call]:
        count = 0
        for times, plus in _OTHERS:
            try:
                made = self._call({**self.example, symbol: times * self.example[symbol] + plus}, fill)
            except Exception:  # whatever it raises for sizes that it was not meant for
                continue
            yield made
            count += 1
            if count == 2:
                return

    @property
    def _symbols(self) -> list[sympy.Symbol]:
        sizes = (size for one in self.values for size in one.shape if isinstance(size, sympy.Expr))
        return sorted({symbol for size in sizes for symbol in size.free_symbols}, key=str)

    def _call(self, environment: Environment, fill: str, seed: int = 0) -> _Call:
        source = torch.Generator().manual_seed(seed)
        shapes = [one.sizes(environment) for one in self.values]
        operands = [_filled(shape, one.dtype, fill, source) for shape, one in zip(shapes, self.values, strict=True)]
        operands += [_of_state(one, source) for one in self.state]
        operands = [tensor.to(self.device) for tensor in operands]
        before = [tensor.clone() for tensor in operands]
        with CountWork() as counted:
            ran = self.invocation.run(operands, seed)
        if not all(map(hold_the_same, operands, before)):
            raise StateError(f"leaf {self.invocation.label} writes to a tensor that it is given, or to a parameter")
        strange = next((name for name, tensor in ran.tensors.items() if tensor.device != self.device), None)
        if strange is not None:
            raise StateError(
                f"leaf {self.invocation.label} makes its result {strange or 'output'!r} on "
                f"{ran.tensors[strange].device}, but what it is given is on {self.device}"
            )
        return _Call(fill, shapes, ran, before, counted.work)

    def _form(self, name: str, calls: Sequence[_Call]) -> Form:
        tensors = [one.ran.tensors[name] if name in one.ran.tensors else one.ran.buffers[name] for one in calls]
        dtypes, ranks = {tensor.dtype for tensor in tensors}, {tensor.dim() for tensor in tensors}
        if len(dtypes) > 1 or len(ranks) > 1:
            raise self._unsteady(name, tensors, calls)
        sizes = [
            found_size([x.shape[dim] for x in tensors], [one.shapes for one in calls]) for dim in range(ranks.pop())
        ]
        if None in sizes:
            raise self._unsteady(name, tensors, calls)
        return Form(dtypes.pop(), tuple(size for size in sizes if size is not None))

    def _unsteady(self, name: str, tensors: Sequence[Tensor], calls: Sequence[_Call]) -> CannotBeLeaf:
        shapes = [list(map(list, one.shapes)) for one in calls]
        pairs = dict.fromkeys(f"{given} -> {list(x.shape)}" for given, x in zip(shapes, tensors, strict=True))
        return CannotBeLeaf(
            f"the form of its result {name or 'output'!r} does not follow from the sizes of its inputs: "
            f"{'; '.join(pairs)}"
        )


@dataclass(frozen=True, eq=False)
class _Call:
    """A call: the kind and the shapes of what it was given, what it has made, of what, and what that took."""

    fill: str
    shapes: Shapes
    ran: Ran
    operands: Sequence[Tensor]
    work: LeafWork

    @property
    def shares(self) -> bool:
        """Whether results share memory with each other, or with what was given."""
        made = list(self.ran.tensors.values())
        storages = [meta.example_storages(one) for one in (*made, list(self.ran.inputs))]
        return len(set().union(*storages)) < sum(map(len, storages))


def _filled(shape: Sequence[int], dtype: torch.dtype, fill: str, source: torch.Generator) -> Tensor:
    if carries_gradient(dtype):
        return _signed(shape, dtype, source) + (0 if fill == "signed" else 0.5)
    count = torch.Size(shape).numel()
    made = {"ones": torch.ones(count), "zeros": torch.zeros(count)}.get(fill, torch.arange(count) % 2)
    return made.reshape(tuple(shape)).to(dtype)


def _signed(shape: Sequence[int], dtype: torch.dtype, source: torch.Generator) -> Tensor:
    """Return random numbers between -0.3 and 0.3."""
    return (torch.rand(tuple(shape), generator=source, dtype=in_double(dtype)) * 0.6 - 0.3).to(dtype)


def _of_state(one: LeafOperand, source: torch.Generator) -> Tensor:
    """Return values of a parameter, which has none while it is captured, or of a buffer."""
    if one.known is not None:
        return one.known.detach()
    return _filled(one.shape, one.dtype, "signed", source) + (0.05 if carries_gradient(one.dtype) else 0)


class _Read(TorchDispatchMode):
    """Notes the memory that ops are given inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, and run the op."""
        given = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor)]
        self.storages |= meta.example_storages(given)
        return func(*args, **(kwargs or {}))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


_OWN = frozenset((*vars(nn.Module()), *LISTED_SLOTS))
_DEPTH = 2
"""Objects in objects are looked at so deep."""
_OBJECT = object()
"""The key, beside those of its attributes, of an object itself."""
_GLOBAL = -1
"""The number, in the place of a module's, of what has globals."""
_Attributes = Mapping[tuple[int, str], Any]


def _attributes(modules: Sequence[nn.Module]) -> _Attributes:
    """Return what modules have besides state, hooks and submodules, and globals that they name; as copies."""
    found = dict[tuple[int, str], Any]()
    for number, module in enumerate(modules):
        kind = type(module)
        found |= {(number, name): _copied(value) for name, value in vars(module).items() if name not in _OWN}
        function = getattr(kind.forward, "__wrapped__", kind.forward)
        space = getattr(function, "__globals__", {})
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        found |= {(_GLOBAL, name): _copied(space[name]) for name in names if name in space}
    return found


def _changed(before: _Attributes, after: _Attributes) -> list[tuple[int, str]]:
    return [key for key in {**before, **after} if not _agree(before.get(key), after.get(key))]


def _copied(value: Any, depth: int = 0) -> Any:
    match value:
        case Tensor():  # one of a trace that has failed has no values
            return value if is_fake(value) else value.detach().clone()
        case dict():
            return {key: _copied(item, depth) for key, item in value.items()}
        case list() | tuple() | deque():
            return [_copied(item, depth) for item in value]
        case type() | ModuleType() | FunctionType() | MethodType() | nn.Module():
            return value
    content = frozen(value)
    if content is not value:
        return value if isinstance(content, Inside) and type(content.content) is object else content
    own = getattr_static(value, "__dict__", None) and vars(value)
    return value if own is None or depth == _DEPTH else {_OBJECT: value, **_copied(dict(own), depth + 1)}


def _agree(first: Any, second: Any) -> bool:
    """Tell whether two values are the same, tensors up to rounding."""
    match first, second:
        case Tensor(), Tensor():
            if is_fake(first) or is_fake(second):
                return first is second
            if (first.shape, first.dtype) != (second.shape, second.dtype):
                return False
            tolerance = _TOLERANCES.get(first.dtype, 1e-4) if carries_gradient(first.dtype) else 0
            return torch.allclose(first.detach(), second.detach(), tolerance, tolerance, equal_nan=True)
        case dict(), dict():
            return first.keys() == second.keys() and all(_agree(item, second[key]) for key, item in first.items())
        case list(), list():
            return len(first) == len(second) and all(map(_agree, first, second))
    return same(first, second) or (type(first) is type(second) and repr(first) == repr(second))


def _read_by(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the trainable tensors that results are computed from, by their graph of autograd."""
    seen = set[Any]()
    left: list[Any] = [tensor.grad_fn for tensor in tensors]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        left += [following for following, _ in node.next_functions]
    yield from (tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf)
