"""What was seen of a kind of device, or is told of it: times of a block, and how they grow on smaller groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetu_fx.base.checks import Source, check_not_negative, check_positive, check_source
from hetu_fx.base.json_values import numbered
from hetu_fx.base.records import Key, record
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


BLOCK_TIME = record(
    BlockTime,
    ProfileError,
    c=Key(written="always"),
    bytes_per_token=Key(written="always"),
    source=Key(written="always"),
)
SLOWDOWN = record(
    Slowdown,
    ProfileError,
    factors=Key(numbered("devices of a group", ProfileError)),
    source=Key(written="always"),
)
