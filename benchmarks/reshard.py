"""Bytes and seconds of resolved reshards: against gather-then-slice, DTensor, and the least that must move.

On 4 and 8 processes of one machine, and on two emulated nodes of two ranks with a slow link, where every reshard
also runs in its flat and its two-level form, and the bytes that cross the link are counted at the interface.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cases.reshard import ACROSS, ITEMSIZE, Case, one_node
from benchmarks.kit.fleet import run_workers, worker_parser
from benchmarks.kit.report import Bar, Row, finish, median_ratio
from benchmarks.workers.reshard import DTENSOR, FLAT, GATHERED, LEVELS, PADDED, RESOLVED, work
from hetu_fx_emulate.emulate import EmulateSpec

LINK_BITS_PER_SECOND = 100e6
SUM_BAR, HAND_OVER_BAR, BYTES_BAR = 1.3, 1.7, 1.0
Times = Mapping[str, Mapping[str, Mapping[str, list[float]]]]


@dataclass(frozen=True, slots=True)
class World:
    """Ranks that run the cases."""

    name: str
    size: int
    nodes: int = 1

    @property
    def cases(self) -> Sequence[Case]:
        return ACROSS if self.nodes > 1 else one_node(self.size)

    @property
    def spec(self) -> EmulateSpec:
        link = LINK_BITS_PER_SECOND if self.nodes > 1 else None
        return EmulateSpec(speeds=(1.6 / self.size,) * self.size, num_nodes=self.nodes, link_bits_per_second=link)


WORLDS = (World("two nodes", 4, nodes=2), World("4 ranks", 4), World("8 ranks", 8))


def main() -> int:
    """Run all worlds under the emulator and judge them."""
    made = worker_parser("reshard", "Bytes and seconds of resolved reshards.")
    made.add_argument("--nodes", type=int, default=1, help=argparse.SUPPRESS)
    options = made.parse_args()
    shape = (384, 1024) if options.quick else (1536, 1536)
    if options.worker is not None:
        return work(options.worker, nodes=options.nodes, shape=shape, rounds=3 if options.quick else 7)
    return judge({world.name: measured(world, quick=options.quick) for world in WORLDS}, shape)


def measured(world: World, *, quick: bool) -> Any:
    """Run one world; give what rank 0 wrote."""
    given = ["--nodes", str(world.nodes), *["--quick"] * quick]
    return run_workers("reshard", given, world.spec, timeout_seconds=900)


def judge(results: Mapping[str, Any], shape: tuple[int, int]) -> int:
    """Turn seconds and bytes into bars and rows."""
    across = results[WORLDS[0].name]["cases"]
    moved = [
        case.resolution(shape).bytes(ITEMSIZE) / case.least_bytes(shape)
        for world in WORLDS
        for case in world.cases
        if case.is_moved(shape)
    ]
    bars = [
        Bar("BSR bytes over the bound", max(moved), BYTES_BAR, at_least=False),
        Bar("two-level all-reduce over flat, slow link", ratio(across, "sum"), SUM_BAR, at_least=True),
        Bar("SR&AG over naive hand-over", ratio(across, "hand-over TP2 to TP2"), HAND_OVER_BAR, at_least=True),
    ]
    rows = [row for world in WORLDS for row in world_rows(world, results[world.name]["cases"], shape)]
    link = results[WORLDS[0].name]["link"]
    return finish("reshard", bars, rows, shape=list(shape), link_bits_per_second=LINK_BITS_PER_SECOND, measured=link)


def ratio(times: Times, case: str) -> float:
    """Give how many times faster two levels are than flat."""
    return median_ratio(times[case][FLAT]["seconds"], times[case][LEVELS]["seconds"])


def world_rows(world: World, times: Times, shape: tuple[int, int]) -> Iterator[Row]:
    """Make the lines of one world's table: bytes in MB, seconds in ms."""
    for case in world.cases:
        found = times[case.name]
        gathered = sum(part.bytes(ITEMSIZE) for part in case.by_gathering(shape))
        row: dict[str, object] = {
            "world": world.name,
            "reshard": case.name,
            "by": "+".join(dict.fromkeys(step.op for step in case.resolution(shape).steps)),
            "MB": case.resolution(shape).bytes(ITEMSIZE) / 1e6,
            "least MB": case.least_bytes(shape) / 1e6,
            "gathered MB": gathered / 1e6,
        }
        for who in (RESOLVED, FLAT, LEVELS, PADDED, GATHERED, DTENSOR):
            row[f"{who}, ms"] = statistics.median(found[who]["seconds"]) * 1e3 if who in found else "-"
        for who in (FLAT, LEVELS, DTENSOR) if world.nodes > 1 else ():
            row[f"{who}, link MB"] = found[who]["link bytes"][0] / 1e6 if who in found else "-"
        yield row


if __name__ == "__main__":
    sys.exit(main())
