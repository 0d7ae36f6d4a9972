"""Things in a row as JSON: those that are equal are written once, with a `count`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, TypeVar

from hetu_fx.base.documents import Fields
from hetu_fx.errors import ProfileError

T = TypeVar("T")


def repeated_json(values: Iterable[T], one: Callable[[T], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the objects of values, of equal ones in a row a single one."""
    return [{"count": len(list(same)), **one(value)} for value, same in groupby(values)]


def read_repeated(values: Sequence[Any], where: str, keys: Sequence[str], read: Callable[[Fields], T]) -> tuple[T, ...]:
    """Read a list of objects that each stand for `count` equal things in a row."""
    return tuple(chain.from_iterable(_run(v, f"{where}[{i}]", keys, read) for i, v in enumerate(values)))


def _run(value: Mapping[str, Any], where: str, keys: Sequence[str], read: Callable[[Fields], T]) -> tuple[T, ...]:
    view = Fields(value, where, ProfileError, ("count", *keys))
    count: int = view.integer("count", 1)
    if count < 1:
        raise ProfileError(f"{where}: count is {count}; give how many of these stand in a row, from 1")
    return (read(view),) * count
