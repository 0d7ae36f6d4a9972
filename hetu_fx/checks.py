"""Checks of numbers that people and files give, each with what to give instead."""

from __future__ import annotations

import math

from hetu_fx.errors import HetuFxError


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
