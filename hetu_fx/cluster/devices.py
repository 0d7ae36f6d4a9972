"""Devices and links: what a cluster consists of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from hetu_fx.base.checks import Source, check_not_negative, check_positive, check_source
from hetu_fx.base.json_values import NUMBER, SIZE, TEXT, TEXTS, many, named_texts, object_by_number
from hetu_fx.base.records import Key, record
from hetu_fx.cluster.chips import find_chip, unknown_chip
from hetu_fx.comm_ops.plans.ways import PLACES
from hetu_fx.errors import ClusterError

FLOPS_PER_BYTE = 5.0
"""Matrix-product FLOPs in the time that moving a byte of memory takes, as measured on a CPU core."""

_FIGURES = ("flops_per_second", "memory_bytes")  # what a device has to say, unless its kind is publicly known


@dataclass(frozen=True, slots=True)
class Device:
    """One device; `rate` is its straggling rate: time now over normal time (1 healthy, 2 twice as slow).

    `source` says where its figures come from: measured, given, or an estimate from public figures of its kind.
    `meeting_seconds` is what the healthy device loses, besides the message, when it meets others between pieces of
    compute: it waits for a period of its quota, for a launch, for those that are late. `step_seconds` is what a step
    takes on its host besides the work of the model. `op_seconds` is what running one op takes besides its work,
    forward or backward; None: nobody has measured it. `place` names the units that it stands in, by level, `nic` the
    port of its node that it hangs on; see `hetu_fx.cluster.topology`.
    """

    rank: int
    kind: str
    node: str
    flops_per_second: float
    memory_bytes: int
    rate: float = 1.0
    source: Source = "given"
    meeting_seconds: float = 0.0
    step_seconds: float = 0.0
    bytes_per_second: float | None = None
    memory_bytes_per_second: float | None = None
    op_seconds: float | None = None
    place: Mapping[str, str] = field(default_factory=dict, hash=False)
    nic: int | None = None

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ClusterError(f"device has rank {self.rank}\nhint: give ranks from 0")
        figures = {"flops_per_second": self.flops_per_second, "memory_bytes": self.memory_bytes, "rate": self.rate}
        figures |= _known(self, "bytes_per_second", "memory_bytes_per_second", "op_seconds")
        check_positive(ClusterError, f"device {self.rank}", **figures)
        check_not_negative(ClusterError, f"device {self.rank}", **self._besides)
        check_source(ClusterError, f"device {self.rank}", self.source)

    @property
    def _besides(self) -> dict[str, float]:
        """Return what it loses besides work and messages, by name."""
        return {"meeting_seconds": self.meeting_seconds, "step_seconds": self.step_seconds}

    @property
    def speed(self) -> float:
        """Return the FLOPs per second it delivers now."""
        return self.flops_per_second / self.rate

    @property
    def meeting_now(self) -> float:
        """Return what a meeting costs it now: a straggler is late by as much more as its work takes longer."""
        return self.meeting_seconds * self.rate

    @property
    def step_now(self) -> float:
        """Return what a step takes on its host besides now: a straggler is slow in this too."""
        return self.step_seconds * self.rate

    @property
    def op_now(self) -> float | None:
        """Return what running an op takes besides its work now; None where nobody has measured it."""
        return None if self.op_seconds is None else self.op_seconds * self.rate

    @property
    def flops_per_byte(self) -> float:
        """Return the FLOPs of products that it does in the time in which it moves a byte of its memory."""
        known = self.known_memory_bytes_per_second
        return self.flops_per_second / known if known else FLOPS_PER_BYTE

    @property
    def known_memory_bytes_per_second(self) -> float | None:
        """Return the speed of its memory, given or publicly known; None where nobody knows it."""
        chip = find_chip(self.kind)
        return self.memory_bytes_per_second or (chip.memory_bytes_per_second if chip else None)

    def usable_bytes(self, fraction: float) -> int:
        """Return the bytes of its memory that plans may use, a fraction of all."""
        return int(self.memory_bytes * fraction)

    def at(self, flops_per_second: float) -> Device:
        """Return the device at another speed: it moves its memory and runs ops faster in the same proportion."""
        memory, ratio = self.known_memory_bytes_per_second, flops_per_second / self.flops_per_second
        return replace(
            self,
            flops_per_second=flops_per_second,
            memory_bytes_per_second=None if memory is None else memory * ratio,
            op_seconds=None if self.op_seconds is None else self.op_seconds / ratio,
        )

    @property
    def most_bytes_per_second(self) -> float:
        """Return what it sends or receives at most; infinite where its links set the limit."""
        return math.inf if self.bytes_per_second is None else self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs: `latency_seconds + bytes / bytes_per_second`."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_positive(ClusterError, "link", bytes_per_second=self.bytes_per_second)
        check_not_negative(ClusterError, "link", latency_seconds=self.latency_seconds)

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that a message of so many bytes takes."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def between(self, *devices: Device) -> Link:
        """Return what it is to devices that send or receive no more than so much."""
        most = min(device.most_bytes_per_second for device in devices)
        return self if most >= self.bytes_per_second else Link(most, self.latency_seconds)


@dataclass(frozen=True, slots=True)
class OutsideLink:
    """What a cluster file says of links between nodes; `per` says whether each device has one, or a node's share it."""

    bytes_per_second: float
    latency_seconds: float = 0.0
    per: str = ""

    @property
    def link(self) -> Link:
        """Return the link itself."""
        return Link(self.bytes_per_second, self.latency_seconds)


PAIRED = ("nodes", "kinds")
"""What a pair of names is of."""


@dataclass(frozen=True, slots=True)
class PairLink:
    """The link between two nodes, or between devices of two kinds on two nodes, where it is not as others are.

    Attributes:
        between: the two names, in alphabetical order.
        bytes_per_second, latency_seconds: of the link.
        of: one of PAIRED.
    """

    between: tuple[str, str]
    bytes_per_second: float
    latency_seconds: float = 0.0
    of: str = "nodes"

    def __post_init__(self) -> None:
        what = f"the link between {' and '.join(self.between)}"
        if self.of not in PAIRED:
            raise ClusterError(f"{what} is one of {self.of!r}\nhint: give one of {', '.join(PAIRED)}")
        if len(self.between) != 2 or (self.of == "nodes" and len(set(self.between)) == 1):
            raise ClusterError(f"a pair of {self.of} is {list(self.between)}\nhint: give the names of two")
        object.__setattr__(self, "between", tuple(sorted(self.between)))
        check_positive(ClusterError, what, bytes_per_second=self.bytes_per_second)
        check_not_negative(ClusterError, what, latency_seconds=self.latency_seconds)

    @property
    def link(self) -> Link:
        """Return the link itself."""
        return Link(self.bytes_per_second, self.latency_seconds)

    def is_among(self, devices: Sequence[Device]) -> bool:
        """Tell whether some devices have both names."""
        return {d.node if self.of == "nodes" else d.kind for d in devices}.issuperset(self.between)


@dataclass(frozen=True, slots=True)
class ClusterLinks:
    """What a cluster file says of links inside a node and between nodes (None: the same), and of pairs unlike these."""

    intra: Link
    inter: OutsideLink | None = None
    pairs: tuple[PairLink, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective was seen to take: `latency_seconds + bytes / bytes_per_second`, of the whole tensor's bytes.

    `name` is one of `hetu_fx.cluster.links.COLLECTIVES`, `where` says whether its `num_ranks` ranks stand on one
    node ("intra") or on several ("inter"), of which there are `num_nodes` (0: all). All are of one `kind` and speed;
    without one they are those of the whole cluster, or of its largest node. `sizes` has the seconds of each number of
    bytes that was timed.
    """

    name: str
    where: str
    num_ranks: int
    bytes_per_second: float
    latency_seconds: float = 0.0
    kind: str = ""
    num_nodes: int = 0
    sizes: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        what = f"collective {self.name!r}"
        if self.where not in PLACES:
            raise ClusterError(f"{what} is timed {self.where!r}\nhint: give one of {', '.join(PLACES)}")
        check_positive(ClusterError, what, bytes_per_second=self.bytes_per_second, num_ranks=self.num_ranks)
        check_not_negative(ClusterError, what, latency_seconds=self.latency_seconds, num_nodes=self.num_nodes)
        check_not_negative(ClusterError, what, **{f"sizes[{size}]": seconds for size, seconds in self.sizes.items()})

    def seconds(self, num_bytes: float) -> float:
        """Return what so many bytes take: between two sizes that were timed as on a line, else by the figures."""
        for low, high in pairwise(sorted(self.sizes)):
            if low <= num_bytes <= high:
                way = (num_bytes - low) / (high - low)
                return self.sizes[low] + way * (self.sizes[high] - self.sizes[low])
        return self.latency_seconds + num_bytes / self.bytes_per_second


def _known(device: Device, *names: str) -> dict[str, float]:
    """Return those of some figures that are known."""
    values = {name: getattr(device, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _device(dtype: str | None, **parts: Any) -> Device:
    """Return the device that a file tells of; figures that it leaves out are those of its kind, if publicly known."""
    kind = "cpu" if parts["kind"] is None else parts["kind"]
    missing = [name for name in _FIGURES if parts[name] is None]
    if missing:
        chip = find_chip(kind)
        if chip is None:
            raise ClusterError(_missing(missing[0]) if parts["kind"] is None else _unknown(kind))
        figures = {"flops_per_second": chip.flops(dtype), "memory_bytes": chip.memory_bytes}
        parts |= {name: figures[name] for name in missing} | {"source": "estimate"}
    elif dtype is not None:
        raise ClusterError(f"'dtype' picks a public figure, but {' and '.join(_FIGURES)} are given\nhint: leave it out")
    return Device(**parts | {"kind": kind})


def _missing(figure: str) -> str:
    return f"{figure!r} is missing\nhint: give {(SIZE if figure == 'memory_bytes' else NUMBER).what}"


def _unknown(kind: str) -> str:
    return f"{unknown_chip(kind)}\nhint: give {' and '.join(_FIGURES)} of the device"


DEVICE = record(
    _device,
    ClusterError,
    like=Device,
    order="rank kind node flops_per_second memory_bytes dtype rate meeting_seconds step_seconds bytes_per_second "
    "memory_bytes_per_second op_seconds place nic source",
    kind=Key(default=None),
    node=Key(default="0", written="always"),
    flops_per_second=Key(default=None),
    memory_bytes=Key(SIZE, default=None),
    dtype=Key(TEXT, default=None, written="never"),
    place=Key(named_texts(ClusterError)),
)
_LINK = record(Link, ClusterError, latency_seconds=Key(written="always"))
_OUTSIDE = record(OutsideLink, ClusterError, latency_seconds=Key(written="always"))
_PAIR = record(
    PairLink,
    ClusterError,
    order="between of bytes_per_second latency_seconds",
    between=Key(TEXTS),
    of=Key(written="always"),
    latency_seconds=Key(written="always"),
)
LINKS = record(ClusterLinks, ClusterError, intra=Key(_LINK), inter=Key(_OUTSIDE), pairs=Key(many(_PAIR.values)))
COLLECTIVE = record(
    Collective, ClusterError, latency_seconds=Key(written="always"), sizes=Key(object_by_number("bytes", ClusterError))
)
