"""Checks of numbers that people and files give, each with what to give instead."""

from __future__ import annotations

import math
from typing import Literal, get_args

from hetu_fx.base.documents import nearest
from hetu_fx.errors import HetuFxError

Source = Literal["measured", "given", "estimate"]
"""Where a figure comes from: a measurement, whoever wrote it down, or public figures and counts."""

SOURCES: tuple[str, ...] = get_args(Source)


def check_positive(error: type[HetuFxError], where: str, **values: float) -> None:
    """Raise `error`, naming the place and the first value that is no finite number above 0."""
    for name, value in values.items():
        if not math.isfinite(value) or value <= 0:
            raise error(f"{where} has {name} {value}; give a finite number above 0")


def check_not_negative(error: type[HetuFxError], where: str, **values: float) -> None:
    """Raise `error`, naming the place and the first value that is no finite number of at least 0."""
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise error(f"{where} has {name} {value}; give a finite number, 0 or more")


def check_source(error: type[HetuFxError], where: str, source: str) -> None:
    """Raise `error` unless `source` is one of `SOURCES`."""
    if source not in SOURCES:
        raise error(f"{where} has source {source!r}{nearest(source, SOURCES)}")
