"""Messages between devices of unlike types, which go through the host: seconds against the slower of copy and wire.

Two ranks stand on two emulated nodes with a slow link; one or both compute on the tests' own type of devices, whose
copies from and to the host are paced. In chunks, copies and wire overlap; whole, they come one after another.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kit.contest import run_rounds
from benchmarks.kit.report import Bar, Row
from hetu_fx.comm_ops.wire import p2p
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.p2p import Tag, post
from tests.kinds import testkind

LINK_BITS_PER_SECOND, MESSAGE_BYTES = 400e6, 16 << 20
SHARE_BAR = 0.8
CASES = {
    "device to host": (testkind.NAME, "cpu"),
    "host to device": ("cpu", testkind.NAME),
    "device to device": (testkind.NAME, testkind.NAME),
}
COPIES = {"copy as fast as the wire": 1.0, "copy four times as fast": 4.0}  # against the wire as it was measured
WIRE, COPY, STAGED, WHOLE = "wire alone", "copy alone", "staged", "staged, whole"


def judge(found: Sequence[Any]) -> tuple[list[Bar], list[Row]]:
    """Judge what `work` has found."""
    bars = [
        Bar(f"slower of copy and wire over staged, {line['what']}, {line['copies']}", share(line), SHARE_BAR, True)
        for line in found
    ]
    return bars, [row(line) for line in found]


def share(line: Any) -> float:
    """Return the seconds of the slower of copy and wire over those of the staged message."""
    slower = max(statistics.median(line["seconds"][who]) for who in (WIRE, COPY))
    return slower / statistics.median(line["seconds"][STAGED])


def row(line: Any) -> Row:
    """Make a line of the table."""
    milliseconds = {f"{who}, ms": statistics.median(times) * 1e3 for who, times in line["seconds"].items()}
    return {"what": line["what"], "copies": line["copies"], **milliseconds}


def work(rounds: int) -> list[dict[str, Any]]:
    """Be one rank: time every case; return a list of {what, copies, seconds by contestant}."""
    device, found = testkind.install(), []
    on_host = torch.ones(MESSAGE_BYTES, dtype=torch.uint8)
    wire = run_rounds({WIRE: partial(_wire, on_host)}, rounds=rounds, warm_up=1)[WIRE]
    for what, types in CASES.items():
        table = GroupTable(name=what)
        table.know_types(types)
        value = on_host.to(device) if types[table.rank] == testkind.NAME else on_host
        for copies, factor in COPIES.items():
            pace = factor * MESSAGE_BYTES / statistics.median(wire)
            ways = {
                WIRE: partial(_wire, on_host),
                COPY: partial(_paced, pace, partial(_copy, value)),
                STAGED: partial(_paced, pace, partial(_message, table, value)),
                WHOLE: partial(_paced, pace, partial(_whole, partial(_message, table, value))),
            }
            seconds = run_rounds(ways, rounds=rounds, warm_up=1)
            found.append({"what": what, "copies": copies, "seconds": seconds})
    return found


def _wire(value: Tensor) -> None:
    """Send from rank 0 to rank 1 as gloo does by itself."""
    if dist.get_rank() == 0:
        dist.send(value, 1)
    else:
        dist.recv(value, 0)


def _message(table: GroupTable, value: Tensor) -> None:
    """Send from rank 0 to rank 1."""
    message = [(1 - table.rank, value, Tag.SLICES)]
    arriving, leaving = ((), message) if table.rank == 0 else (message, ())
    post(arriving, leaving, table).wait()


def _copy(value: Tensor) -> None:
    value.cpu()


def _paced(bytes_per_second: float, act: Callable[[], None]) -> None:
    """Do something with copies at this pace."""
    with mock.patch.object(testkind, "copied_bytes_per_second", bytes_per_second):
        act()


def _whole(act: Callable[[], None]) -> None:
    """Do something with messages in one chunk."""
    with mock.patch.multiple(p2p, CHUNK_BYTES=MESSAGE_BYTES, LEAST_CHUNK_BYTES=MESSAGE_BYTES):
        act()
