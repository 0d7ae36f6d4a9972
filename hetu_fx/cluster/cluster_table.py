"""A cluster as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetu_fx.base.words import bytes_text, ranks_text, rate_text, seconds_text
from hetu_fx.cluster.chips import chip_text
from hetu_fx.cluster.devices import Device, Link
from hetu_fx.cluster.topology import Level
from hetu_fx.show.table import table_text

_COLUMNS: Mapping[str, Callable[[Device], str]] = {
    "device": lambda device: str(device.rank),
    "kind": lambda device: chip_text(device.kind) if device.source == "estimate" else device.kind,
    "node": lambda device: device.node,
    "speed": lambda device: rate_text(device.flops_per_second, "FLOP/s"),
    "rate": lambda device: f"{device.rate:.3g}",
    "memory": lambda device: bytes_text(device.memory_bytes),
    "meeting": lambda device: seconds_text(device.meeting_now) if device.meeting_seconds else "",
    "host": lambda device: seconds_text(device.step_now) if device.step_seconds else "",
    "sends": lambda device: rate_text(device.bytes_per_second) if device.bytes_per_second is not None else "",
    "bandwidth": lambda d: rate_text(d.memory_bytes_per_second) if d.memory_bytes_per_second is not None else "",
    "op": lambda d: seconds_text(d.op_seconds) if d.op_seconds is not None else "",
}
"""The table of a cluster; a column where nobody has measured anything, or links set all limits, is left out."""


def link_text(link: Link) -> str:
    """Return what a link carries, and its latency where it has one: `1 GB/s, 10 us`."""
    latency = f", {seconds_text(link.latency_seconds)}" if link.latency_seconds else ""
    return f"{rate_text(link.bytes_per_second)}{latency}"


def cluster_text(devices: Sequence[Device], links: Mapping[str, Link]) -> str:
    """Return the table of devices, the named links, and which devices' figures nobody measured or gave."""
    columns = {name: list(map(text, devices)) for name, text in _COLUMNS.items()}
    told = {name: column for name, column in columns.items() if any(column)}
    rows = list(zip(*told.values(), strict=True))
    shown = [f"{name} {link_text(link)}" for name, link in links.items()]
    return "\n".join([table_text(list(told), rows), f"links: {'; '.join(shown)}", *_estimates(devices)])


def level_links(levels: Sequence[Level]) -> dict[str, Link]:
    """Return the link of each level, by its name and whose it is."""
    return {f"{level.within}{f' (per {level.per})' if level.per else ''}": level.link for level in levels}


def _estimates(devices: Sequence[Device]) -> list[str]:
    ranks = [device.rank for device in devices if device.source == "estimate"]
    return [f"estimates from public figures of their kinds: devices {ranks_text(ranks)}"] if ranks else []
