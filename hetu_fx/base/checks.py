"""What people and files give: checks of numbers and keys, each with what to give instead, and sizes in bytes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Literal, TypeVar, get_args

from hetu_fx.base.documents import nearest
from hetu_fx.errors import HetuFxError

Source = Literal["measured", "given", "estimate"]
"""Where a figure comes from: a measurement, whoever wrote it down, or public figures and counts."""

SOURCES: tuple[str, ...] = get_args(Source)

K = TypeVar("K", bound=Hashable)


def standing_twice(keys: Iterable[K]) -> list[K]:
    """Return the keys that stand more than once, in the order in which they stand first."""
    return [key for key, count in Counter(keys).items() if count > 1]


def check_positive(error: type[HetuFxError], where: str, **values: float) -> None:
    """Raise `error`, naming the place and the first value that is no finite number above 0."""
    for name, value in values.items():
        if not math.isfinite(value) or value <= 0:
            raise error(f"{where} has {name} {value}\nhint: give a finite number above 0")


def check_not_negative(error: type[HetuFxError], where: str, **values: float) -> None:
    """Raise `error`, naming the place and the first value that is no finite number of at least 0."""
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise error(f"{where} has {name} {value}\nhint: give a finite number, 0 or more")


def check_source(error: type[HetuFxError], where: str, source: str) -> None:
    """Raise `error` unless `source` is one of `SOURCES`."""
    if source not in SOURCES:
        raise error(f"{where} has source {source!r}{nearest(source, SOURCES)}")


def size_parts(text: str, kilo: int) -> tuple[str, int] | None:
    """Return the number of a size such as "2G", "512 MB" or "3GiB", as it is written, and what it counts in bytes.

    K, M, G and T count by `kilo`, 1000 or 1024; Ki, Mi, Gi and Ti by 1024. None for what is no size.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*(?:([KMGT])(i?))?B?\s*", text, flags=re.IGNORECASE)
    if match is None:
        return None
    return match[1], (1024 if match[3] else kilo) ** (" KMGT".index((match[2] or " ").upper()))
