"""What people and files give: checks of numbers and keys, each with what to give instead, sizes in bytes, and rates."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Literal, TypeVar, get_args

from hetu_fx.base.documents import nearest
from hetu_fx.errors import EnvironmentProblem, HetuFxError

Source = Literal["measured", "given", "estimate"]
"""Where a figure comes from: a measurement, whoever wrote it down, or public figures and counts."""

SOURCES: tuple[str, ...] = get_args(Source)

_RATE_FACTORS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

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


def parse_rate(text: str) -> float:
    """Read "200mbit" as bits per second."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmg]?bit)(?:/s|ps)?\s*", text, flags=re.IGNORECASE)
    if match is None:
        raise EnvironmentProblem(f"link rate {text!r} is not a rate\nhint: write it like 200mbit or 1gbit")
    return number_in(match[1], "link rate") * _RATE_FACTORS[match[2].lower()]


def number_in(text: str, what: str) -> float:
    """Read a number, or say what is none."""
    try:
        return float(text)
    except ValueError:
        raise EnvironmentProblem(f"{what} {text.strip()!r} is not a number") from None
