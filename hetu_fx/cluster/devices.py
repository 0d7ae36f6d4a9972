"""Devices and links: what a cluster consists of, and the public figures of accelerators.

Those are for clusters that are planned for before anybody has measured them: peaks as their makers state them, dense
matrix products by element type, memory and its bandwidth. What programs reach is less, by a factor that differs little
between chips of one family; so these are estimates, good for shares between devices and lower bounds of seconds, and
whoever uses them says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hetu_fx.base.checks import Source, check_not_negative, check_positive, check_source
from hetu_fx.base.documents import nearest
from hetu_fx.base.json_values import INTEGER, NUMBER, TEXT
from hetu_fx.base.records import Key, record
from hetu_fx.errors import ClusterError

DTYPES = ("bf16", "fp16", "fp32")
"""Element types of products, in the order in which they are preferred for training."""

_GIB = 1 << 30
_TERA = 1e12


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of device.

    Attributes:
        name: how cluster files call it.
        flops_per_second: peak of dense matrix products by element type (of `DTYPES`).
        memory_bytes: what the device has.
        memory_bytes_per_second: peak bandwidth of that memory.
        source: where the figures stand.
        other_names: what torch and others call it.
    """

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    source: str
    other_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        bandwidth = {"memory_bytes_per_second": self.memory_bytes_per_second}
        figures = {**self.flops_per_second, "memory_bytes": self.memory_bytes, **bandwidth}
        check_positive(ClusterError, f"chip {self.name}", **figures)
        if not self.flops_per_second.keys() <= set(DTYPES):
            raise ClusterError(f"chip {self.name} has speeds for {list(self.flops_per_second)}; known are {DTYPES}")

    def flops(self, dtype: str | None = None) -> float:
        """Return the peak for an element type; None: the first of `DTYPES` that it multiplies."""
        if dtype is None:
            return next(self.flops_per_second[known] for known in DTYPES if known in self.flops_per_second)
        if dtype not in self.flops_per_second:
            known = ", ".join(self.flops_per_second)
            raise ClusterError(f"chip {self.name} has no figure for dtype {dtype!r}; there are some for {known}")
        return self.flops_per_second[dtype]


@cache
def find_chip(kind: str) -> Chip | None:
    """Return the chip of a name, in any case and with spaces, dashes or underscores; None for one that is not known."""
    return _BY_NAME.get(_plain(kind))


def unknown_chip(kind: str) -> str:
    """Return the part of a message that says that a kind has no public figures here, with the nearest that has."""
    return f"kind {kind!r} is not in the table of public figures{nearest(kind, tuple(chip.name for chip in CHIPS))}"


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _chip(
    name: str,
    gib: int,
    gigabytes_per_second: float,
    source: str,
    *other_names: str,
    **tera: float,
) -> Chip:
    speeds = {dtype: value * _TERA for dtype, value in tera.items()}
    return Chip(name, speeds, gib * _GIB, gigabytes_per_second * 1e9, source, other_names)


_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (half of the figures with sparsity)"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"

CHIPS = (
    _chip("P100-16G", 16, 732, "NVIDIA Tesla P100 datasheet", "Tesla P100-SXM2-16GB", fp16=21.2, fp32=10.6),
    _chip("V100-16G", 16, 900, _V100, "Tesla V100-SXM2-16GB", fp16=125, fp32=15.7),
    _chip("V100-32G", 32, 900, _V100, "Tesla V100-SXM2-32GB", fp16=125, fp32=15.7),
    _chip("T4", 16, 320, "NVIDIA Turing architecture whitepaper", "Tesla T4", fp16=65, fp32=8.1),
    _chip("A100-40G", 40, 1555, _A100, "NVIDIA A100-SXM4-40GB", bf16=312, fp16=312, fp32=19.5),
    _chip("A100-80G", 80, 2039, _A100, "NVIDIA A100-SXM4-80GB", "A100", bf16=312, fp16=312, fp32=19.5),
    _chip("A800-80G", 80, 2039, _A100, "NVIDIA A800-SXM4-80GB", "A800", bf16=312, fp16=312, fp32=19.5),
    _chip("H100-80G", 80, 3350, _H100, "NVIDIA H100 80GB HBM3", "H100", bf16=989, fp16=989, fp32=67),
    _chip("H800-80G", 80, 3350, _H100, "NVIDIA H800", "H800", bf16=989, fp16=989, fp32=67),
    _chip("H200-141G", 141, 4800, "NVIDIA H200 datasheet", "NVIDIA H200", "H200", bf16=989, fp16=989, fp32=67),
    _chip("H20-96G", 96, 4000, "NVIDIA H20 specification", "NVIDIA H20", "H20", bf16=148, fp16=148, fp32=44),
    _chip("L40S", 48, 864, "NVIDIA L40S datasheet", "NVIDIA L40S", bf16=362, fp16=362, fp32=91.6),
    _chip("MI300X", 192, 5300, "AMD Instinct MI300X datasheet", "AMD Instinct MI300X", bf16=1307, fp16=1307, fp32=163),
)
"""The table, by family and age."""

_BY_NAME = {_plain(name): chip for chip in CHIPS for name in (chip.name, *chip.other_names)}


WHERE = ("intra", "inter")
FLOPS_PER_BYTE = 5.0
"""Matrix-product FLOPs in the time that moving a byte of memory takes, as measured on a CPU core."""

_FIGURES = ("flops_per_second", "memory_bytes")  # what a device has to say, unless its kind is publicly known


@dataclass(frozen=True, slots=True)
class Device:
    """One device; `rate` is its straggling rate: time now over normal time (1 healthy, 2 twice as slow).

    `source` says where its figures come from: measured, given, or an estimate from public figures of its kind.
    `meeting_seconds` is what the healthy device loses, besides the message, when it meets others between pieces of
    compute: it waits for a period of its quota, for a launch, for those that are late. `step_seconds` is what a step
    takes on its host besides the work of the model.
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

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ClusterError(f"device has rank {self.rank}; ranks count from 0")
        figures = {"flops_per_second": self.flops_per_second, "memory_bytes": self.memory_bytes, "rate": self.rate}
        figures |= _known(self, "bytes_per_second", "memory_bytes_per_second")
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
    def flops_per_byte(self) -> float:
        """Return the FLOPs of products that it does in the time in which it moves a byte of its memory."""
        chip = find_chip(self.kind)
        known = self.memory_bytes_per_second or (chip.memory_bytes_per_second if chip else None)
        return self.flops_per_second / known if known else FLOPS_PER_BYTE

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
class ClusterLinks:
    """What a cluster file says of links inside a node and between nodes; None: the same."""

    intra: Link
    inter: Link | None = None


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective was seen to take: `latency_seconds + bytes / bytes_per_second`, of the whole tensor's bytes.

    `name` is one of `hetu_fx.cluster.links.COLLECTIVES`, `where` says whether its `num_ranks` ranks stand on one
    node ("intra") or on several ("inter").
    """

    name: str
    where: str
    num_ranks: int
    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        what = f"collective {self.name!r}"
        if self.where not in WHERE:
            raise ClusterError(f"{what} is timed {self.where!r}; give one of {', '.join(WHERE)}")
        check_positive(ClusterError, what, bytes_per_second=self.bytes_per_second, num_ranks=self.num_ranks)
        check_not_negative(ClusterError, what, latency_seconds=self.latency_seconds)


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
        raise ClusterError(f"'dtype' picks a public figure, but {' and '.join(_FIGURES)} are given; leave it out")
    return Device(**parts | {"kind": kind})


def _missing(figure: str) -> str:
    return f"{figure!r} is missing; give {(INTEGER if figure == 'memory_bytes' else NUMBER).what}"


def _unknown(kind: str) -> str:
    return f"{unknown_chip(kind)}; give {' and '.join(_FIGURES)} of the device"


DEVICE = record(
    _device,
    ClusterError,
    like=Device,
    order="rank kind node flops_per_second memory_bytes dtype rate meeting_seconds step_seconds bytes_per_second "
    "memory_bytes_per_second source",
    kind=Key(default=None),
    node=Key(default="0", written="always"),
    flops_per_second=Key(default=None),
    memory_bytes=Key(default=None),
    dtype=Key(TEXT, default=None, written="never"),
)
_LINK = record(Link, ClusterError, latency_seconds=Key(written="always"))
LINKS = record(ClusterLinks, ClusterError, intra=Key(_LINK), inter=Key(_LINK))
COLLECTIVE = record(Collective, ClusterError, latency_seconds=Key(written="always"))
