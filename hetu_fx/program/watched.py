"""Watch a forward while it is traced: what it reads of modules and of the objects that they refer to, and writes.

For that time `nn.Module`, and the classes of those objects, have a `__getattribute__` and a `__setattr__` that note.
Globals and closures are found in the code of the user's functions instead (`code_reads`), as nothing can note them.
"""

from __future__ import annotations

import enum
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hetu_fx.base.torch_private import CALLS, LISTED_SLOTS, SLOTS, buffer_slots, not_saved
from hetu_fx.graph.tracing.contents import ABSENT, PLAIN, Inside, Space, frozen, same
from hetu_fx.graph.unread import StandIn, passed_name
from hetu_fx.program.code_reads import CodeReads, Surroundings
from hetu_fx.program.reads import Access, Read, Reads, own_value
from hetu_fx.program.structure import place

_OWN = frozenset(vars(nn.Module()))
_NO_CONFIGS = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType, enum.Enum, torch.SymInt, torch.SymFloat)
_SETTINGS = ("argparse", "collections", "multiprocessing", "weakref", "_weakrefset")
_MOST_ITEMS = 256
Place = tuple[int, str]
"""An attribute: the number of what has it, and its name."""


class Watch:
    """Notes what a forward reads and writes; for one capture.

    Args:
        model: its modules are known by their names.
        loss_fn: what makes the loss, if the model does not.

    Attributes:
        changed: attributes that the forward has read and left otherwise, which a graph cannot do, and what it has left;
            buffers that it has registered, filled or made of another form.
        written: what it has written without reading it first, and the values that it has left.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.model, self.loss_fn = model, loss_fn
        self._thread = threading.get_ident()
        self._forget()

    def _forget(self) -> None:
        self._of_the_model: dict[int, Space] = {}
        self._known: dict[int, tuple[str, Any]] = {}
        self._written: dict[Place, Access] = {}
        self._kinds: set[type] = set()
        self._code = CodeReads(self._reach)
        self._read = self._code.found
        self.surroundings = Surroundings()
        self.changed: list[tuple[Access, Any]] = []
        self.written: list[tuple[Access, Any]] = []

    @contextmanager
    def watching(self) -> Iterator[Mapping[str, Any]]:
        """Note what is read and written inside, in this thread; what was noted before is forgotten. Gives nothing."""
        self._forget()
        modules = [(place(name), module) for name, module in self.model.named_modules()]
        self._buffers = [(label, module, dict(buffer_slots(module))) for label, module in modules]
        self._of_the_model = {id(vars(module)): dict(vars(module)) for _, module in modules}
        if isinstance(self.loss_fn, nn.Module):
            modules += [(f"loss_fn{name and '.'}{name}", module) for name, module in self.loss_fn.named_modules()]
        with ExitStack() as self._patches:
            self._patch(nn.Module)
            self._patches.callback(self._of_the_model.clear)  # a recurrent layer's has references to its parameters
            for _, module in modules:
                self._patches.callback(not_saved(module).intersection_update, set(not_saved(module)))
            for label, module in modules:
                self._know(vars(module), label)
            for kind in {type(module) for _, module in modules}:
                self._code.look_at_class(kind)
            if isinstance(self.loss_fn, FunctionType | MethodType):
                self._code.inspect_function(self.loss_fn)
            with self.surroundings.watching():
                try:
                    yield {}
                except BaseException:  # also what ends a trace in the middle: the next one finds what this one found
                    self._put_back()
                    raise
        self._finish()

    def reads(self, others: Iterable[Read]) -> Reads:
        """Return what was read, and others, as they are now: outside of the trace, so that no value of it is there."""
        named = (*self.surroundings.found.values(), *others)
        reads: dict[Any, Read] = {(id(one.owner), one.name): one for one in named}
        in_classes = list[Read]()
        for key, access in self._read.items():
            if access.name == "__dict__" and not access.value:  # of a function without attributes, as most are
                continue
            if access.owner is vars(self.model) and access.name in CALLS:  # its own run the graphs
                own = type(self.model)
                reads[id(own), access.name] = Read(f"{access.name!r} of the model's class", own, access.name)
                continue
            read, kind = Read(access.label, access.owner, access.name), type(access.holder)
            is_own = not isinstance(access.owner, dict) or access.name in access.owner
            found = None if is_own else next((one for one in kind.__mro__ if access.name in vars(one)), None)
            if found is None:
                reads[key] = read
                continue
            in_classes.append(read)
            if not isinstance(vars(found)[access.name], classmethod):
                label = f"{access.name!r} of class {found.__qualname__}"
                reads[id(kind), access.name] = Read(label, kind, access.name)
        return Reads(reads.values(), in_classes)

    @property
    def asks_classes(self) -> bool:
        """Tell whether the user's own functions may ask for classes by `type`, which no stand-in notices."""
        return self._code.asks_classes

    @property
    def clocks(self) -> list[tuple[Space, str]]:
        """Return the clocks that the user's own functions read: what has them, and under which names."""
        return [*((vars(time), name) for name in sorted(self.surroundings.clocks)), *self._code.clocks]

    def _put_back(self) -> None:
        """Let attributes and buffers be what they were."""
        for access in (*self._read.values(), *self._written.values(), *self._new_buffers()):
            if not same(access.now, access.copy):
                access.put_back()
        self._code.forget()

    def _finish(self) -> None:
        self._code.forget()
        changed = [access for access in self._read.values() if not same(access.now, access.copy)]
        self.changed = [(access, frozen(access.now)) for access in (*changed, *self._new_buffers())]
        for access, _ in self.changed:
            access.put_back()
        self.written = [(access, access.now) for access in self._written.values()]

    def _new_buffers(self) -> Iterator[Access]:
        """Yield places for buffers that have one now, and had none before or one of another form."""
        for label, module, before in self._buffers:
            slots = buffer_slots(module)
            for name, buffer in slots.items():
                old = before.get(name, ABSENT)
                if buffer is not None and (not isinstance(old, Tensor) or _form(old) != _form(buffer)):
                    yield Access(f"buffer {name!r} of {label}", slots, name, module, old, old)

    def _know(self, owner: Any, label: str) -> None:
        self._known.setdefault(id(owner), (label, owner))  # kept, as long as its number counts

    def _patch(self, kind: type) -> None:
        """Let a class note accesses; one whose attributes cannot be set is left as it is."""
        get: Callable[..., Any] = kind.__getattribute__
        set_: Callable[..., Any] = kind.__setattr__

        def getting(owner: Any, name: str) -> Any:
            try:
                value = get(owner, name)
            except AttributeError:
                self._note(owner, name, ABSENT)
                raise
            self._note(owner, name, value)
            return value

        def setting(owner: Any, name: str, value: Any) -> None:
            if isinstance(value, StandIn):
                passed_name(value)  # which reads it: what is left in an attribute is read later
            self._note_write(owner, name)
            set_(owner, name, value)

        for dunder, function in (("__getattribute__", getting), ("__setattr__", setting)):
            self._patches.enter_context(mock.patch.object(kind, dunder, function))

    def _note(self, owner: Any, name: str, value: Any) -> None:
        access = self._first(owner, name)
        if access is None:
            return
        self._read[id(access.owner), name] = access
        if access.before is not ABSENT:
            self._reach(access.before if value is ABSENT else value, f"{name} of {self._known[id(access.owner)][0]}")

    def _note_write(self, owner: Any, name: str) -> None:
        access = self._first(owner, name)
        if access is not None and isinstance(access.owner, dict):
            self._written[id(access.owner), name] = access

    def _first(self, holder: Any, name: str) -> Access | None:
        """Return the access to an attribute, if it is known what has it and this is the first."""
        if (name in _OWN and name != "training") or name.startswith("__") or threading.get_ident() != self._thread:
            return None
        owner = _attributes(holder)
        if isinstance(holder, nn.Module):
            if id(owner) not in self._of_the_model:
                owner = self._slots_apart(owner, name)
            elif name == "training" or _is_of_slots(holder, owner, name):
                return None
        key = (id(owner), name)
        if key[0] not in self._known or key in self._read or key in self._written:
            return None
        before = own_value(owner, name)
        if isinstance(before, PLAIN):  # which the forward may have written already, past `__setattr__`
            before = self._of_the_model.get(key[0], {name: before}).get(name, ABSENT)
        return Access(f"{name!r} of {self._known[key[0]][0]}", owner, name, holder, before, frozen(before))

    def _slots_apart(self, space: Space, name: str) -> Space:
        """Return what keeps a tensor or submodule of a module that is none of the model's, else the module's own."""
        label, _ = self._known.get(id(space), ("", None))
        if not label:
            return space
        slots: Space = next((space[kind] for kind in SLOTS if name in space[kind]), space)
        self._know(slots, label)
        return slots

    def _reach(self, value: Any, label: str) -> None:
        """Watch an object that something known refers to, and those in a container."""
        if isinstance(value, PLAIN):
            return
        if isinstance(value, FunctionType | MethodType):
            self._code.inspect_function(value)
        elif isinstance(value, list | tuple | dict | deque):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(items)[:_MOST_ITEMS]:
                self._reach(item, f"{label}[{key!r}]")
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                self._know(vars(module), f"{label}{name and '.'}{name}")
        elif isinstance(value, SimpleNamespace):  # its class cannot be patched: all that it has counts as read
            for name, item in vars(value).items():
                self._code.note(vars(value), name, item, f"{name!r} of {label}")
                self._reach(item, f"{name} of {label}")
        elif isinstance(content := frozen(value), Inside):
            self._reach(content.content, label)
        elif _is_config(value):
            self._know(_attributes(value), label)
            if type(value) not in self._kinds:
                self._kinds.add(type(value))
                self._patch(type(value))


def _form(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device


def _is_config(value: Any) -> bool:
    """Tell whether a value is an object of a class of the user's, or of a library's that keeps settings."""
    kind = type(value)
    if isinstance(value, _NO_CONFIGS) or not kind.__flags__ & 1 << 9:  # made by a class statement
        return False
    library = kind.__module__.partition(".")[0]
    return library in _SETTINGS or library not in sys.stdlib_module_names | {"torch", "sympy", "numpy"}


def _is_of_slots(module: nn.Module, space: Space, name: str) -> bool:
    """Tell whether an attribute is what is in a module's slots, which are compared by themselves."""
    if isinstance(module, nn.RNNBase) and name in LISTED_SLOTS:
        return True
    return any(name in space[kind] for kind in SLOTS)


def _attributes(holder: Any) -> Any:
    """Return the dictionary of an object's own attributes, or the object where it has none."""
    try:
        return object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return holder
