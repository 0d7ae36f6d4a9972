"""Plain values that a forward has read: of modules, of the objects that they refer to, of classes, and globals.

A captured graph holds while they are what they were. That is told by identities, over lists that were prepared once;
only what is another object, or can change inside, is compared.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain, repeat
from operator import contains
from queue import Queue
from typing import Any, NoReturn

import torch
from torch import Tensor

from hetu_fx.base.torch_private import tree_leaves, version
from hetu_fx.errors import StateError
from hetu_fx.graph.meta import SYMBOLIC
from hetu_fx.graph.tracing.contents import ABSENT, PLAIN, Inside, RawMemory, frozen, put, same
from hetu_fx.graph.unread import StandIn
from hetu_fx.program.structure import told_hook, type_name

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
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, ABSENT)
        return getattr(self.owner, self.name, ABSENT)


@dataclass(frozen=True, eq=False, slots=True)
class Access(Read):
    """The first access to an attribute in a forward: to be compared, and to be put back.

    Attributes:
        holder: the object that has it; `owner` are its attributes, or itself where it has no dictionary of them.
        before: what the holder itself had there; `ABSENT` for what is in its class.
        copy: of that, if it is a container.
    """

    holder: Any
    before: Any
    copy: Any

    @property
    def now(self) -> Any:
        """Return what the holder itself has there now."""
        return own_value(self.owner, self.name)

    def as_now(self) -> Access:
        """Return an access to the same attribute, before which it is what it is now."""
        return replace(self, before=self.now, copy=frozen(self.now))

    def put_back(self) -> None:
        """Let the holder have again what it had."""
        had = self.copy.content if isinstance(self.copy, Inside) else self.copy
        held = self.before
        if isinstance(held, threading.local | Queue):
            held = held.queue if isinstance(held, Queue) else held.__dict__
        match held:
            case list() | deque():
                held.clear()
                held.extend(had)
            case dict() | set():
                held.clear()
                held.update(had)
            case ContextVar():
                held.set(had)
        if isinstance(self.owner, dict):
            put(self.owner, self.name, self.before)
        elif self.now is not self.before and self.before is not ABSENT:
            setattr(self.owner, self.name, self.before)


def own_value(owner: Any, name: str) -> Any:
    """Return what there is under a name, past what notes accesses, and not what a class has; `ABSENT` if nothing."""
    if isinstance(owner, dict):
        return owner.get(name, ABSENT)
    try:
        return (type if isinstance(owner, type) else object).__getattribute__(owner, name)
    except AttributeError:
        return ABSENT


class Reads:
    """Values that were read, as they are when this is made.

    Args:
        reads: which.
        in_classes: what was found in the class of an object; an attribute of its own, which hides it, is another.
    """

    def __init__(self, reads: Iterable[Read], in_classes: Iterable[Read] = ()) -> None:
        entries, others = list[Read](), list[Read]()
        for read in reads:
            (entries if isinstance(read.owner, dict) else others).append(read)
        self._reads, self._in_classes = (*entries, *others), tuple(in_classes)
        self._entries, self._others, self._hidden = map(_columns, (entries, others, self._in_classes))
        values = [read.value for read in self._reads]
        self._known = list(map(frozen, values))
        self._tensors = [value for value in values if isinstance(value, Tensor)]
        self._versions = list(map(version, self._tensors))

    def hold(self) -> bool:
        """Tell whether all values are what they were; most are the same objects."""
        now = chain(map(dict.get, *self._entries, repeat(ABSENT)), map(getattr, *self._others, repeat(ABSENT)))
        return (
            all([value is known or same(value, known) for value, known in zip(now, self._known, strict=True)])
            and not any(map(contains, *self._hidden))
            and list(map(version, self._tensors)) == self._versions
        )

    @property
    def facts(self) -> Mapping[str, str]:
        """Return what was read as it was, by what it is of."""
        return {read.label: show_value(known) for read, known in zip(self._reads, self._known, strict=True)}

    @property
    def facts_now(self) -> Mapping[str, str]:
        """Return the same as it is now."""
        now = {read.label: show_value(frozen(read.value)) for read in self._reads}
        return now | {read.label: show_value(read.value) for read in self._in_classes if read.value is not ABSENT}


def _columns(reads: Iterable[Read]) -> tuple[list[Any], list[str]]:
    """Return what has each, and the names: what functions of the interpreter are mapped over."""
    listed = list(reads)
    return [read.owner for read in listed], [read.name for read in listed]


def show_value(value: Any) -> str:
    """Show a value, the same on all ranks: plain ones as they are, others by their kind."""
    match value:
        case dict():
            text = "{" + ", ".join(f"{key!r}: {show_value(item)}" for key, item in value.items()) + "}"
        case list() | deque():
            text = f"[{', '.join(map(show_value, value))}]"
        case tuple():
            text = f"({', '.join(map(show_value, value))})"
        case set() | frozenset():
            text = "{" + ", ".join(sorted(map(show_value, value))) + "}"
        case Inside():
            text = type_name(value.kind) + ("" if type(value.content) is object else f" of {show_value(value.content)}")
        case Tensor():
            text = f"a tensor of shape {list(value.shape)}"
        case _ if isinstance(value, SYMBOLIC):
            text = "a number of a batch"
        case _ if value is ABSENT or isinstance(value, (*PLAIN, RawMemory)):
            text = repr(value)
        case _ if callable(value) and not isinstance(value, type | torch.nn.Module):
            text = told_hook(value)
        case _:
            text = type_name(value if isinstance(value, type) else type(value))
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


class NotKept:
    """Stands for what a forward has left in an attribute: the graphs that run it leave nothing. Any use is refused."""

    def __init__(self, label: str) -> None:
        self.__dict__["label"] = label

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StateError(
            f"{self.__dict__['label']} is set by the forward, but that runs as captured graphs, which set nothing\n"
            f'hint: return the value as an output, or use hetu_fx.auto_parallelize(..., capture="eager")'
        )

    def __getattr__(self, name: str) -> Any:
        """Refuse, but for the protocols that others look for."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be an operand."""
        next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, NotKept))._refuse()

    def __repr__(self) -> str:
        return f"<{self.__dict__['label']}: set by the forward, not kept by graphs>"

    __call__ = __getitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __eq__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __pow__ = __matmul__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __hash__ = object.__hash__


def is_of_the_trace(value: Any) -> bool:
    """Tell whether a value is none that is left after a trace: a tensor or a size of it, or has some."""
    match value:
        case _ if isinstance(value, StandIn):
            return True
        case dict():
            return any(map(is_of_the_trace, value.values()))
        case list() | tuple() | set() | frozenset():
            return any(map(is_of_the_trace, value))
        case _:
            return isinstance(value, (Tensor, *SYMBOLIC)) or not (isinstance(value, PLAIN) or callable(value))
