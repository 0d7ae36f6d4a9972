"""Take a batch or an output apart into named tensors, and put it together again.

A structure is described by a `Tree`, a closed union. Tensors have names: the path of keys, attribute names
and positions that leads to them, joined by dots; a bare tensor has the name "".
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from hetu_fx.errors import StateError
from hetu_fx.graph.unread import StandIn, can_stand_in, passed_name


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Stands for the tensor of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class NumberSlot(TensorSlot):
    """Stands for a Python number that is read from a tensor.

    `shown` is the number's name in the output, `expression` what it is of the number that is read (None: itself).
    """

    shown: str = ""
    expression: Any = None

    def number(self, read: torch.Tensor) -> Any:
        """Return it from the tensor that it is read from."""
        if self.expression is None:
            return read.item()
        (symbol,) = self.expression.free_symbols
        made = self.expression.subs(symbol, read.item())
        return int(made) if made.is_Integer else float(made)


@dataclass(frozen=True, slots=True)
class Constant:
    """Stands for a plain value (None, number, string) that is part of the structure."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Passed:
    """Stands for a plain value of a batch that the forward does not read: that of the input of this name, as it is."""

    name: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands for an object that is neither a tensor, a plain value nor a known container."""

    name: str
    value: Any
    type_name: str


@dataclass(frozen=True, slots=True)
class Items:
    """Stands for a tuple, named tuple or list."""

    type: type
    children: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """Stands for a mapping, or a dataclass instance (`keys` are then its fields)."""

    type: type
    keys: tuple[Any, ...]
    children: tuple[Tree, ...]


LOSS = "loss"
FIRST = ("", "output", "0")  # what an output is called that stands alone, or comes first

Leaf = TensorSlot | Constant | Passed | Opaque
Tree = Leaf | Items | Entries

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)


class Withheld:
    """Stands in an output for an object that a parallel step cannot bring back, such as a cache; says so when used.

    What the object does not have, this has not either: libraries ask every output for its `dtype`.
    """

    __slots__ = ("attributes", "name", "type_name")
    TOLD_FIELDS: ClassVar = ("name", "type_name", "attributes")

    def __init__(self, name: str, type_name: str, attributes: Iterable[str]) -> None:
        self.name, self.type_name, self.attributes = name, type_name, frozenset(attributes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Withheld) and (self.name, self.type_name) == (other.name, other.type_name)

    def __hash__(self) -> int:
        return hash((self.name, self.type_name))

    def __repr__(self) -> str:
        return f"Withheld({self.name!r}, {self.type_name})"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or name in Withheld.__slots__ or name not in self.attributes:
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StateError(
            f"output {self.name!r} is a {self.type_name} of all ranks' rows, spread over devices, and is not brought "
            f"back from a parallel step\nhint: call the model inside `with model.hetu.whole():`, as model.generate does"
        )


class WithheldNumber(Withheld):
    """Stands in an output for a Python number (or text) that a graph does not give; says why when it is used."""

    __slots__ = ()

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why, ())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}: {self.type_name.splitlines()[0]})"

    def _use(self, *_: Any) -> NoReturn:
        self._refuse()

    __float__ = __int__ = __index__ = __bool__ = __complex__ = __round__ = __abs__ = __neg__ = __format__ = _use
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _use
    __lt__ = __le__ = __gt__ = __ge__ = _use

    def _refuse(self) -> NoReturn:
        raise StateError(
            f"output {self.name!r} is a Python value, which a parallel step does not return: {self.type_name}"
        )


NOT_ASKED = (
    "outputs other than the loss were not asked for\nhint: ask for them by "
    'hetu_fx.auto_parallelize(..., outputs="all"), or read the loss alone'
)


class WithheldTensorError(StateError, AttributeError):
    """An output is used that a training step has not brought back; an AttributeError, so that `hasattr` says no."""


class WithheldTensor(WithheldNumber):
    """Stands in an output for a tensor that a training step has not brought back; says so when it is used."""

    __slots__ = ()

    def __init__(self, name: str, why: str = NOT_ASKED) -> None:
        super().__init__(name, why)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or name in Withheld.__slots__:
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be an argument of a function of torch."""
        given = walk(flatten([args, kwargs or {}])[0])
        next(leaf.value for leaf in given if isinstance(leaf, Opaque) and isinstance(leaf.value, cls))._refuse()

    def __eq__(self, other: object) -> bool:
        return self._refuse() if isinstance(other, torch.Tensor) else super().__eq__(other)

    __hash__ = Withheld.__hash__
    __invert__ = __array__ = __matmul__ = __rmatmul__ = __pow__ = WithheldNumber._use

    def _refuse(self) -> NoReturn:
        raise WithheldTensorError(
            f"output {self.name!r} was not brought back from this training step: under this plan it would have to be "
            f"sent or kept, and {self.type_name}"
        )


def loss_among(names: Sequence[str], scalars: Collection[str], trained: Collection[str]) -> str | None:
    """Return the name of the loss among a model's outputs, None where there is none, or it is not told which it is.

    It is the output named "loss"; else the only number that needs a gradient, wherever it stands; else a number that
    stands alone or comes first, unless only others need a gradient.

    Args:
        names: of all output tensors, in order.
        scalars: those that are one real number.
        trained: those that need a gradient.
    """
    if LOSS in names:
        return LOSS if LOSS in scalars else None
    learning = [name for name in names if name in scalars and name in trained]
    if len(learning) == 1:
        return learning[0]
    first = next(iter(names), None)
    return first if first in FIRST and first in (learning or scalars) else None


def flatten(value: Any) -> tuple[Tree, dict[str, torch.Tensor]]:
    """Describe the structure of `value` and list its tensors by name, in order."""
    tensors: dict[str, torch.Tensor] = {}
    return _flatten(value, (), tensors), tensors


def _flatten(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Tree:
    name = ".".join(path)
    if isinstance(value, StandIn):
        return Passed(passed_name(value))
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return TensorSlot(name)
    if isinstance(value, PLAIN_TYPES):
        return Constant(name, value)
    if isinstance(value, Mapping):
        return _flatten_fields(value, tuple(value), tuple(value.values()), path, tensors)
    if isinstance(value, (tuple, list)):
        children = (_flatten(item, (*path, str(i)), tensors) for i, item in enumerate(value))
        return Items(type(value), tuple(children))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys = tuple(field.name for field in dataclasses.fields(value) if field.init)
        return _flatten_fields(value, keys, tuple(getattr(value, key) for key in keys), path, tensors)
    return Opaque(name, value, type(value).__qualname__)


def _flatten_fields(
    value: Any,
    keys: tuple[Any, ...],
    items: tuple[Any, ...],
    path: tuple[str, ...],
    tensors: dict[str, torch.Tensor],
) -> Entries:
    children = (_flatten(item, (*path, str(key)), tensors) for key, item in zip(keys, items, strict=True))
    return Entries(type(value), keys, tuple(children))


def passing(tree: Tree, names: Collection[str] | None = None) -> tuple[Tree, dict[str, Any]]:
    """Return a batch's tree in which strings, and lists of plain values, are `Passed`; and these values by name.

    They are those of the given names; None: all that there are.
    """
    found: dict[str, Any] = {}

    def at(tree: Tree, path: tuple[str, ...]) -> Tree:
        name = ".".join(path)
        if name and (names is None or name in names) and _may_be_passed(tree):
            found[name] = unflatten(tree, {})
            return Passed(name)
        match tree:
            case Items(kind, children):
                return Items(kind, tuple(at(child, (*path, str(i))) for i, child in enumerate(children)))
            case Entries(kind, keys, children):
                pairs = zip(keys, children, strict=True)
                return Entries(kind, keys, tuple(at(child, (*path, str(key))) for key, child in pairs))
            case leaf:
                return leaf

    return at(tree, ()), found


def _may_be_passed(tree: Tree) -> bool:
    match tree:
        case Constant(_, value):
            return can_stand_in(type(value))
        case Items(kind, children):
            return can_stand_in(kind) and all(map(_is_plain, children))
        case _:
            return False


def _is_plain(tree: Tree) -> bool:
    match tree:
        case Items(kind, children) | Entries(kind, _, children):
            return kind in (list, tuple, dict) and all(map(_is_plain, children))
        case leaf:
            return isinstance(leaf, Constant)


def unflatten(tree: Tree, values: Mapping[str, Any]) -> Any:
    """Build the structure again with `values` in its slots; a slot without a value becomes None.

    Values of what is `Passed` are under the names that `passed_values` gives them.
    """
    match tree:
        case NumberSlot() as slot:
            return slot.number(values[slot.name]) if slot.name in values else WithheldNumber(slot.shown, NOT_ASKED)
        case TensorSlot(name):
            return values.get(name)
        case Passed(name):
            return values.get(_slot_of_passed(name))
        case Constant(_, value) | Opaque(_, value):
            return value
        case Items(kind, children):
            return _build_items(kind, [unflatten(child, values) for child in children])
        case Entries(kind, keys, children):
            return _build_fields(kind, dict(zip(keys, (unflatten(c, values) for c in children), strict=True)))


def passed_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values of a batch, or their stand-ins, by input name, as `unflatten` takes them beside tensors."""
    return {_slot_of_passed(name): value for name, value in values.items()}


def _slot_of_passed(name: str) -> str:
    return f"input {name!r}"  # outputs may have the names of inputs


def passed_names(tree: Tree) -> frozenset[str]:
    """Return the names of the inputs that are passed on."""
    return frozenset(leaf.name for leaf in walk(tree) if isinstance(leaf, Passed))


def _build_items(kind: type, items: list[Any]) -> Any:
    if hasattr(kind, "_make"):  # named tuples
        return kind._make(items)
    return items if issubclass(kind, list) else tuple(items)


def _build_fields(kind: type, items: dict[Any, Any]) -> Any:
    if dataclasses.is_dataclass(kind):  # also the mapping-like output classes that are dataclasses
        return kind(**items)
    if kind is dict or not issubclass(kind, dict):
        return items
    return kind(items)


def walk(tree: Tree) -> Iterator[Leaf]:
    """List the leaves of a tree in order."""
    match tree:
        case Items(_, children) | Entries(_, _, children):
            for child in children:
                yield from walk(child)
        case leaf:
            yield leaf


def map_leaves(tree: Tree, change: Callable[[Leaf], Tree]) -> Tree:
    """Return the tree with every leaf replaced by what `change` makes of it."""
    match tree:
        case Items(kind, children):
            return Items(kind, tuple(map_leaves(child, change) for child in children))
        case Entries(kind, keys, children):
            return Entries(kind, keys, tuple(map_leaves(child, change) for child in children))
        case leaf:
            return change(leaf)


def without_opaque(tree: Tree) -> Tree:
    """Return the tree with what says that it is withheld in the place of every opaque object."""
    return map_leaves(tree, lambda leaf: _withheld(leaf) if isinstance(leaf, Opaque) else leaf)


def _withheld(leaf: Opaque) -> Constant:
    return Constant(leaf.name, Withheld(leaf.name, leaf.type_name, dir(leaf.value)))


def loss_alone(tree: Tree, loss: str) -> Tree:
    """Return the tree of an output of which only the loss comes back: None for objects, other tensors say so when used.

    `loss` is its name among the tensors.
    """

    def blank(leaf: Leaf) -> Tree:
        if isinstance(leaf, TensorSlot) and not isinstance(leaf, NumberSlot) and leaf.name != loss:
            return Constant(leaf.name, WithheldTensor(leaf.name or "output"))
        value = leaf.value if isinstance(leaf, Constant) else None
        is_object = isinstance(value, Withheld) and not isinstance(value, WithheldNumber)
        return Constant(leaf.name, None) if is_object else leaf

    return map_leaves(tree, blank)
