"""Plain values that a forward has read: of modules, of the objects that they refer to, of classes, and globals.

A captured graph holds while they are what they were. That is told by identities, over lists that were prepared once;
only what has become another object is compared.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetu_fx.base.torch_private import version
from hetu_fx.graph.meta import SYMBOLIC
from hetu_fx.program.contents import PLAIN, Inside, Memory, can_change, frozen, same
from hetu_fx.program.structure import told_hook, type_name


class _Absent:
    def __repr__(self) -> str:
        return "none"


ABSENT = _Absent()
"""Stands for the value of an attribute that is not there."""

Space = dict[str, Any]
_MOST_SHOWN = 80


@dataclass(frozen=True, eq=False, slots=True)
class Read:
    """A value that was read: an entry of a dictionary, or an attribute of a class or of an object without one.

    Attributes:
        label: what it is, for people.
        owner: what has it.
        name: under which name.
    """

    label: str
    owner: Any
    name: str

    @property
    def value(self) -> Any:
        """Return what it is now; `ABSENT` if it is not there."""
        if type(self.owner) is dict:
            return self.owner.get(self.name, ABSENT)
        return getattr(self.owner, self.name, ABSENT)


class Methods(NamedTuple):
    """Names that were found in the class of an object: as its own attributes they would hide what is there.

    Attributes:
        label: what the object is, for people.
        space: its own attributes.
        names: that were found.
    """

    label: str
    space: Space
    names: Collection[str]

    @property
    def hidden(self) -> dict[str, str]:
        """Return what hides something now."""
        return {f"{name!r} of {self.label}": shown(self.space[name]) for name in self.names if name in self.space}


class Reads:
    """Values that were read, as they are when this is made.

    Args:
        reads: which.
        methods: what was found in the classes of objects.
    """

    def __init__(self, reads: Iterable[Read], methods: Iterable[Methods]) -> None:
        every = tuple(reads)
        self._entries = [read for read in every if type(read.owner) is dict]
        self._others = [read for read in every if type(read.owner) is not dict]
        self._dicts, self._names = [read.owner for read in self._entries], [read.name for read in self._entries]
        self._methods = list(methods)
        self._spaces = [method.space for method in self._methods]
        self._arm()

    def hold(self) -> bool:
        """Tell whether all values are what they were."""
        if self._are_untouched():
            return True
        if not self._are_equal():
            return False
        self._arm()
        return True

    @functools.cached_property
    def facts(self) -> Mapping[str, str]:
        """Return what was read as it was, by what it is of."""
        copies = {id(value): copy for value, copy in self._containers}
        values = zip((*self._entries, *self._others), (*self._values, *self._found), strict=True)
        return {read.label: shown(copies.get(id(value), value)) for read, value in values}

    @property
    def facts_now(self) -> Mapping[str, str]:
        """Return the same as it is now."""
        now = {read.label: shown(frozen(read.value)) for read in (*self._entries, *self._others)}
        for method in self._methods:
            now.update(method.hidden)
        return now

    def _arm(self) -> None:
        """Take what is there now as what was read."""
        self._values = [read.value for read in self._entries]
        self._found = [read.value for read in self._others]
        found = [(read.owner, read.name, value) for read, value in zip(self._others, self._found, strict=True)]
        self._lasting = _columns(one for one in found if type(one[-1]) is not MethodType)
        # Of these each look-up makes another object.
        self._bound = _columns(one for one in found if type(one[-1]) is MethodType)
        both = (*self._values, *self._found)
        self._containers = [(value, frozen(value)) for value in both if can_change(value)]
        self._tensors = [value for value in both if isinstance(value, Tensor)]
        self._versions = list(map(version, self._tensors))
        self._sizes = list(map(len, self._spaces))

    def _are_untouched(self) -> bool:
        return (
            all(map(is_, map(dict.get, self._dicts, self._names, repeat(ABSENT)), self._values))
            and all(map(is_, _now(*self._lasting[:2]), self._lasting[-1]))
            and all(map(same, _now(*self._bound[:2]), self._bound[-1]))
            and list(map(len, self._spaces)) == self._sizes
            and self._contents_are_equal()
        )

    def _are_equal(self) -> bool:
        reads, values = (*self._entries, *self._others), (*self._values, *self._found)
        return (
            all(same(read.value, before) for read, before in zip(reads, values, strict=True))
            and not any(method.hidden for method in self._methods)
            and self._contents_are_equal()
        )

    def _contents_are_equal(self) -> bool:
        return list(map(version, self._tensors)) == self._versions and all(
            same(value, copy) for value, copy in self._containers
        )


def _now(owners: Iterable[Any], fields: Iterable[str]) -> Iterator[Any]:
    return map(getattr, owners, fields, repeat(ABSENT))


def _columns(found: Iterable[tuple[Any, str, Any]]) -> tuple[list[Any], list[str], list[Any]]:
    listed = list(found)
    return [owner for owner, *_ in listed], [field for _, field, _ in listed], [value for *_, value in listed]


def shown(value: Any) -> str:
    """Show a value, the same on all ranks: plain ones as they are, others by their kind."""
    match value:
        case dict():
            text = "{" + ", ".join(f"{key!r}: {shown(item)}" for key, item in value.items()) + "}"
        case list() | deque():
            text = f"[{', '.join(map(shown, value))}]"
        case tuple():
            text = f"({', '.join(map(shown, value))})"
        case set() | frozenset():
            text = "{" + ", ".join(sorted(map(shown, value))) + "}"
        case Inside():
            text = type_name(value.kind) + ("" if type(value.content) is object else f" of {shown(value.content)}")
        case Tensor():
            text = f"a tensor of shape {list(value.shape)}"
        case _ if isinstance(value, SYMBOLIC):
            text = "a number of a batch"
        case _ if value is ABSENT or isinstance(value, (*PLAIN, Memory)):
            text = repr(value)
        case _ if callable(value) and not isinstance(value, type | torch.nn.Module):
            text = told_hook(value)
        case _:
            text = type_name(value if isinstance(value, type) else type(value))
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
