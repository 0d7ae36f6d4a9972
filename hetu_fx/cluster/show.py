"""A cluster as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetu_fx.cluster.devices import Device, Link
from hetu_fx.cluster.topology import Level
from hetu_fx.show.table import table_text

_COLUMNS: Mapping[str, Callable[[Device], str]] = {
    "device": lambda device: str(device.rank),
    "kind": lambda device: device.kind,
    "node": lambda device: device.node,
    "GFLOP/s": lambda device: f"{device.flops_per_second / 1e9:.4g}",
    "rate": lambda device: f"{device.rate:.3g}",
    "memory MB": lambda device: f"{device.memory_bytes / 1e6:.4g}",
    "meeting ms": lambda device: f"{device.meeting_now * 1e3:.3g}",
    "step ms": lambda device: f"{device.step_now * 1e3:.3g}" if device.step_seconds else "",
    "MB/s": lambda device: f"{device.bytes_per_second / 1e6:.4g}" if device.bytes_per_second is not None else "",
    "moves MB/s": lambda d: f"{d.memory_bytes_per_second / 1e6:.4g}" if d.memory_bytes_per_second is not None else "",
    "op us": lambda d: f"{d.op_seconds * 1e6:.3g}" if d.op_seconds is not None else "",
}
"""The table of a cluster; a column where nobody has measured anything, or links set all limits, is left out."""


def _link_text(link: Link) -> str:
    return f"{link.bytes_per_second / 1e6:.4g} MB/s, {link.latency_seconds * 1e6:.3g} us"


def cluster_text(devices: Sequence[Device], links: Mapping[str, Link]) -> str:
    """Return the table of devices, the named links, and which devices' figures nobody measured or gave."""
    columns = {name: list(map(text, devices)) for name, text in _COLUMNS.items()}
    told = {name: column for name, column in columns.items() if any(column)}
    rows = list(zip(*told.values(), strict=True))
    shown = [f"{name} {_link_text(link)}" for name, link in links.items()]
    return "\n".join([table_text(list(told), rows), f"links: {'; '.join(shown)}", *_estimates(devices)])


def level_links(levels: Sequence[Level]) -> dict[str, Link]:
    """Return the link of each level, by its name and whose it is."""
    return {f"{level.within}{f' (per {level.per})' if level.per else ''}": level.link for level in levels}


def _estimates(devices: Sequence[Device]) -> list[str]:
    ranks = [device.rank for device in devices if device.source == "estimate"]
    return [f"estimates from public figures of their kinds: devices {ranks}"] if ranks else []
