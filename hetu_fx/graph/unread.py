"""Stand-ins for plain values of a batch while a forward is traced, which tell whether it reads them.

File names or ids that the forward only passes on are not part of what was captured: other batches, and other ranks, may
have others. A stand-in may be moved, put into containers and returned, and asked for its class, which is that of all it
may stand for. Any other use ends the trace, and the next one gets the value itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from hetu_fx.base.torch_private import register_pytree_node

_OF_CLASSES = ("__class__", "__class_getitem__", "__doc__", "__init__", "__init_subclass__", "__new__")


class ValueRead(BaseException):
    """Ends a trace that reads a stand-in; no Exception, so that no code in between takes it for a failure."""


class StandIn:
    """Stands for a plain value, whose attributes it has; `kind` is the class of that."""

    __slots__ = ("_name", "_value", "_values")
    kind: ClassVar[type]

    def __init__(self, values: UnreadValues, name: str, value: Any) -> None:
        for slot, content in zip(("_values", "_name", "_value"), (values, name, value), strict=True):
            object.__setattr__(self, slot, content)

    def __getattribute__(self, name: str) -> Any:
        """Note a read of what all values of the class have; what none has says nothing of this one."""
        kind = type(self).kind
        if name == "__class__":
            return kind
        return getattr(_read(self) if hasattr(kind, name) else _own(self, "_value"), name)


def _own(stand_in: StandIn, slot: str) -> Any:
    return object.__getattribute__(stand_in, slot)


def _read(stand_in: StandIn) -> Any:
    """Return the value; raises ValueRead while a forward is traced."""
    _own(stand_in, "_values").note(_own(stand_in, "_name"))
    return _own(stand_in, "_value")


def passed_name(stand_in: StandIn) -> str:
    """Return the name of the input whose value is passed on; inside of a forward it counts as read.

    Raises:
        ValueRead: a forward is traced.
    """
    _read(stand_in)
    name: str = _own(stand_in, "_name")
    return name


def _stand_in(kind: type) -> type[StandIn]:
    """Return the class of stand-ins for values of a class, with all that the interpreter looks for in their class."""

    def using(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(_read(self), name)(*args, **kwargs)

    found = {name: using(name) for name in dir(kind) if name.startswith("__") and name not in (*_OF_CLASSES, *_KEPT)}
    return type(f"StandInFor_{kind.__name__}", (StandIn,), {**found, "kind": kind, "__slots__": ()})


_KEPT = ("__getattribute__", "__subclasshook__")
_STAND_INS: Mapping[type, type[StandIn]] = {kind: _stand_in(kind) for kind in (str, bytes, list, tuple)}
for _kind in (list, tuple):
    Sequence.register(_STAND_INS[_kind])  # so that `case [first, *others]:` and torch's trees look inside
    register_pytree_node(_STAND_INS[_kind], lambda it: (list(it), it.__class__), lambda items, kind: kind(items))


def can_stand_in(kind: type) -> bool:
    """Tell whether there are stand-ins for values of a class: what a forward may pass on without reading it."""
    return kind in _STAND_INS


class UnreadValues:
    """Plain values of a batch that no trace has been seen to read.

    Args:
        values: by the names of the inputs.

    Attributes:
        stand_ins: for them, by name.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.stand_ins = {name: _STAND_INS[type(value)](self, name, value) for name, value in values.items()}
        self._read = set[str]()
        self._is_open = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is read inside."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def note(self, name: str) -> None:
        """Know that a value is read. Raises ValueRead where that is watched."""
        if self._is_open:
            self._read.add(name)
            raise ValueRead(name)

    def check_classes(self, are_asked: bool) -> None:
        """Count all as read where a forward may ask for classes by `type`. Raises ValueRead there."""
        if are_asked and self.stand_ins:
            self._read.update(self.stand_ins)
            raise ValueRead("type")

    def take_out(self, *, failed: bool) -> bool:
        """Take out what a trace has read, or all if it failed without; tell whether that was any."""
        found = self._read or (set(self.stand_ins) if failed else set())
        self.stand_ins = {name: value for name, value in self.stand_ins.items() if name not in found}
        self._read = set()
        return bool(found)
