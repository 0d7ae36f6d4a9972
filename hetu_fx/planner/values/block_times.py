"""What was seen of a kind of device, or is told of it: times of a block, and how they grow on smaller groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetu_fx.base.checks import Source, check_not_negative, check_positive, check_source
from hetu_fx.base.documents import Fields, located
from hetu_fx.errors import ProfileError


@dataclass(frozen=True, slots=True)
class BlockTime:
    """How long one block takes on a healthy tensor parallel group of one kind of devices.

    A sequence of s tokens takes `t(s) = a s^2 + b s + c` seconds, forward and backward; each device of the group
    keeps `bytes_per_token` bytes of it for the backward. `r_squared` is how well measured times lie on that curve.
    """

    kind: str
    tensor_parallel: int
    a: float
    b: float
    c: float = 0.0
    bytes_per_token: float = 0.0
    r_squared: float | None = None
    source: Source = "given"

    def __post_init__(self) -> None:
        where = f"time of a block on {self.tensor_parallel} x {self.kind!r}"
        check_positive(ProfileError, where, tensor_parallel=self.tensor_parallel)
        check_not_negative(ProfileError, where, a=self.a, b=self.b, c=self.c, bytes_per_token=self.bytes_per_token)
        check_source(ProfileError, where, self.source)
        if self.a == self.b == 0:
            raise ProfileError(f"{where} has a = b = 0, so that tokens cost nothing; give one of them above 0")

    def seconds(self, length: int) -> float:
        """Return t(s) of a sequence of so many tokens."""
        return (self.a * length + self.b) * length + self.c

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `read_block_time` reads."""
        result: dict[str, Any] = {"kind": self.kind, "tensor_parallel": self.tensor_parallel}
        result |= {"a": self.a, "b": self.b, "c": self.c, "bytes_per_token": self.bytes_per_token}
        fit = {} if self.r_squared is None else {"r_squared": self.r_squared}
        return result | fit | {"source": self.source}


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Malleus' alpha: how much longer a block takes on smaller groups than on the largest, by number of devices."""

    kind: str
    factors: Mapping[int, float] = field(hash=False)
    source: Source = "given"

    def __post_init__(self) -> None:
        where = f"alpha of {self.kind!r}"
        check_positive(ProfileError, where, **{f"factors[{degree}]": v for degree, v in self.factors.items()})
        check_source(ProfileError, where, self.source)
        if min(self.factors, default=0) < 1:
            raise ProfileError(f"{where} has degrees {sorted(self.factors)}; give one at least, from 1")

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `read_slowdown` reads."""
        return {"kind": self.kind, "factors": numbered_json(self.factors), "source": self.source}


def read_block_time(value: Mapping[str, Any], where: str) -> BlockTime:
    """Read one entry of `times`; raise `ProfileError` with its place."""
    keys = ("kind", "tensor_parallel", "a", "b", "c", "bytes_per_token", "r_squared", "source")
    view = Fields(value, where, ProfileError, keys)
    parts: dict[str, Any] = {
        "kind": view.text("kind"),
        "tensor_parallel": view.integer("tensor_parallel"),
        "a": view.number("a"),
        "b": view.number("b"),
        "c": view.number("c", 0.0),
        "bytes_per_token": view.number("bytes_per_token", 0.0),
        "r_squared": view.number("r_squared", None),
        "source": view.text("source", "given"),
    }
    return located(BlockTime, parts, where)


def read_slowdown(value: Mapping[str, Any], where: str) -> Slowdown:
    """Read one entry of `alpha`; raise `ProfileError` with its place."""
    view = Fields(value, where, ProfileError, ("kind", "factors", "source"))
    factors = read_numbered(view, "factors", "devices of a group")
    parts = {"kind": view.text("kind"), "factors": factors, "source": view.text("source", "given")}
    return located(Slowdown, parts, where)


def numbered_json(values: Mapping[int, float]) -> dict[str, float]:
    """Return numbers by whole numbers as JSON has them, in order."""
    return {str(key): value for key, value in sorted(values.items())}


def read_numbered(view: Fields, key: str, what: str, default: Any = None) -> dict[int, float]:
    """Read an object of numbers by whole numbers, which JSON writes as strings; `what` they count is told in errors."""
    given = view.mapping(key) if default is None else view.mapping(key, default)
    wrong = [name for name in given if not name.isdecimal()]
    if wrong:
        raise ProfileError(f'{view.where}: {key!r} has keys {wrong}; give whole numbers of {what}, such as "8"')
    inner = Fields(given, f"{view.where}.{key}", ProfileError, tuple(given))
    return {int(name): inner.number(name) for name in given}
