"""Devices and links: what a cluster consists of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetu_fx.base.checks import Source, check_not_negative, check_positive, check_source
from hetu_fx.base.documents import REQUIRED, Fields, located
from hetu_fx.cluster.chips import find_chip, unknown_chip
from hetu_fx.errors import ClusterError

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

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this device."""
        result: dict[str, Any] = {"rank": self.rank, "kind": self.kind, "node": self.node}
        result |= {"flops_per_second": self.flops_per_second, "memory_bytes": self.memory_bytes}
        result |= {} if self.rate == 1.0 else {"rate": self.rate}
        result |= {name: seconds for name, seconds in self._besides.items() if seconds}
        result |= _known(self, "bytes_per_second", "memory_bytes_per_second")
        return result if self.source == "given" else result | {"source": self.source}


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

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this link."""
        return {"bytes_per_second": self.bytes_per_second, "latency_seconds": self.latency_seconds}


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective was seen to take: `latency_seconds + bytes / bytes_per_second`, of the whole tensor's bytes.

    `name` is one of `hetu_fx.cluster.collectives.COLLECTIVES`, `where` says whether its `num_ranks` ranks stand on one
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

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this collective."""
        return asdict(self)


def _known(device: Device, *names: str) -> dict[str, float]:
    """Return those of some figures that are known."""
    values = {name: getattr(device, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def read_device(value: Mapping[str, Any], where: str) -> Device:
    """Read one entry of `devices`; raise `ClusterError` with its place."""
    keys = (
        "rank",
        "kind",
        "node",
        *_FIGURES,
        "rate",
        "source",
        "dtype",
        "meeting_seconds",
        "step_seconds",
        "bytes_per_second",
        "memory_bytes_per_second",
    )
    fields = Fields(value, where, ClusterError, keys)
    kind, is_whole = fields.text("kind", "cpu"), all(name in value for name in _FIGURES)
    if is_whole and "dtype" in value:
        raise ClusterError(
            f"{where}: 'dtype' picks a public figure, but {' and '.join(_FIGURES)} are given; leave it out"
        )
    flops, memory = (REQUIRED, REQUIRED) if is_whole else _public_figures(fields, kind, where)
    parts: dict[str, Any] = {
        "rank": fields.integer("rank"),
        "kind": kind,
        "node": fields.text("node", "0"),
        "flops_per_second": fields.number("flops_per_second", flops),
        "memory_bytes": fields.integer("memory_bytes", memory),
        "rate": fields.number("rate", 1.0),
        "source": fields.text("source", "given") if is_whole else "estimate",
        "meeting_seconds": fields.number("meeting_seconds", 0.0),
        "step_seconds": fields.number("step_seconds", 0.0),
        "bytes_per_second": fields.number("bytes_per_second", None),
        "memory_bytes_per_second": fields.number("memory_bytes_per_second", None),
    }
    return located(Device, parts, where)


def _public_figures(fields: Fields, kind: str, where: str) -> tuple[Any, Any]:
    """Return (FLOPs per second, memory bytes) of a kind that is publicly known, for a device without its own."""
    chip = find_chip(kind)
    if chip is not None:
        return chip.flops(fields.text("dtype", None)), chip.memory_bytes
    if "kind" in fields.value:
        raise ClusterError(f"{where}: {unknown_chip(kind)}; give {' and '.join(_FIGURES)} of the device")
    return REQUIRED, REQUIRED


def read_link(value: Mapping[str, Any], where: str) -> Link:
    """Read one entry of `links`; raise `ClusterError` with its place."""
    fields = Fields(value, where, ClusterError, ("bytes_per_second", "latency_seconds"))
    parts = {
        "bytes_per_second": fields.number("bytes_per_second"),
        "latency_seconds": fields.number("latency_seconds", 0.0),
    }
    return located(Link, parts, where)


def read_collective(value: Mapping[str, Any], where: str) -> Collective:
    """Read one entry of `collectives`; raise `ClusterError` with its place."""
    fields = Fields(value, where, ClusterError, ("name", "where", "num_ranks", "bytes_per_second", "latency_seconds"))
    parts: dict[str, Any] = {
        "name": fields.text("name"),
        "where": fields.text("where"),
        "num_ranks": fields.integer("num_ranks"),
        "bytes_per_second": fields.number("bytes_per_second"),
        "latency_seconds": fields.number("latency_seconds", 0.0),
    }
    return located(Collective, parts, where)
