"""One attribute that a forward has read or written, as it was before: to be compared, and to be put back."""

from __future__ import annotations

import threading
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, replace
from queue import Queue
from typing import Any

from hetu_fx.program.contents import frozen
from hetu_fx.program.reads import ABSENT, Space


@dataclass(frozen=True, eq=False, slots=True)
class Access:
    """The first access to an attribute in a forward.

    Attributes:
        label: what it is, for people.
        owner: what has it.
        space: the owner's own attributes; None for an object without.
        name: of the attribute.
        before: what the owner itself had there; `ABSENT` for what is in its class.
        copy: of that, if it is a container.
    """

    label: str
    owner: Any
    space: Space | None
    name: str
    before: Any
    copy: Any

    @property
    def now(self) -> Any:
        """Return what the owner itself has there now."""
        return own_value(self.owner, self.space, self.name)

    def as_now(self) -> Access:
        """Return an access to the same attribute, before which it is what it is now."""
        return replace(self, before=self.now, copy=frozen(self.now))

    def put_back(self) -> None:
        """Let the owner have again what it had."""
        match self.before:
            case list() as held:
                held[:] = self.copy
            case deque() as held:
                held.clear()
                held.extend(self.copy)
            case dict() | set() as held:
                held.clear()
                held.update(self.copy)
            case threading.local() as held:
                held.__dict__.clear()
                held.__dict__.update(self.copy.content)
            case Queue() as held:
                held.queue.clear()
                held.queue.extend(self.copy.content)
            case ContextVar() as held:
                held.set(self.copy.content)
        if self.space is not None:
            put(self.space, self.name, self.before)
        elif self.now is not self.before and self.before is not ABSENT:
            setattr(self.owner, self.name, self.before)


def put(space: Space, name: str, value: Any) -> None:
    """Let an object have an attribute, or none."""
    if value is ABSENT:
        space.pop(name, None)
    else:
        space[name] = value


def own_value(owner: Any, space: Space | None, name: str) -> Any:
    """Return what an object itself has under a name, in its space if it has one; `ABSENT` if nothing."""
    if space is not None:
        return space.get(name, ABSENT)
    try:  # past what notes accesses
        return (type if isinstance(owner, type) else object).__getattribute__(owner, name)
    except AttributeError:
        return ABSENT
