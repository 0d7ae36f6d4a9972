"""Collectives over devices of two types, inside each and across: seconds against the price that a planner goes by.

Two ranks of each type stand on a node of their own: the tests' type, whose messages leave from where they are, and the
host's. The links are those that `Cluster.measure` finds, staged messages among them, and copies from and to the host
are paced, then and later. Prices are those of the algorithm that a graph would be given.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kit.contest import run_rounds
from benchmarks.kit.report import Bar, Row
from benchmarks.transport.direct import DirectTransport
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.algorithm import FLAT, Algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import ChooseAlgorithm, algorithm_of_parts, algorithm_of_sums
from hetu_fx.comm_ops.plans.cost import (
    Cost,
    all_reduce_cost,
    ring_cost,
    two_level_all_reduce_cost,
    two_level_ring_cost,
)
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from tests.comm_ops.at_once import chosen
from tests.kinds import testkind

TENSOR_BYTES = 16 << 20
PRICE_BAR = 1.1
TYPES = (testkind.NAME, testkind.NAME, "cpu", "cpu")
RANKS = tuple(range(len(TYPES)))
LINK_BITS_PER_SECOND = 200e6  # so slow that what the emulated devices do with a quota of processor time counts little
COPIES = {"copy as fast as the wire": 25e6, "copy four times as fast": 100e6}  # bytes per second
Run = Callable[[Tensor, Algorithm, GroupTable], object]


def _gather(x: Tensor, algorithm: Algorithm, table: GroupTable) -> object:
    own = x.chunk(len(RANKS))[table.rank]
    return chosen(RANKS, algorithm, table).gather(own, [own.shape] * len(RANKS)).wait()


COLLECTIVES: Mapping[str, tuple[Run, ChooseAlgorithm, Cost, Cost]] = {
    "all_reduce": (
        lambda x, algorithm, table: chosen(RANKS, algorithm, table).sum(x).wait(),
        algorithm_of_sums,
        two_level_all_reduce_cost,
        all_reduce_cost,
    ),
    "all_gather": (_gather, algorithm_of_parts, two_level_ring_cost, ring_cost),
    "reduce_scatter": (
        lambda x, algorithm, table: chosen(RANKS, algorithm, table).scatter(x.chunk(len(RANKS))).wait(),
        algorithm_of_parts,
        two_level_ring_cost,
        ring_cost,
    ),
}


def judge(found: Sequence[Any]) -> tuple[list[Bar], list[Row]]:
    """Judge what `work` has found."""
    bars = [
        Bar(f"composed {line['what']} over its price, {line['copies']}", _over(line, "composed"), PRICE_BAR, False)
        for line in found
    ]
    return bars, [_row(line) for line in found]


def _over(line: Any, way: str) -> float:
    return statistics.median(line["seconds"][way]) / float(line["prices"][way])


def _row(line: Any) -> Row:
    taken = {f"{way}, ms": statistics.median(times) * 1e3 for way, times in line["seconds"].items()}
    priced = {f"{way} priced, ms": price * 1e3 for way, price in line["prices"].items()}
    named = {name: line[name] for name in ("what", "copies", "algorithm")}
    least = {"composed, least, ms": min(line["seconds"]["composed"]) * 1e3}
    return {**named, **taken, **least, **priced, "segments sent again": line["sent_again"]}


def work(rounds: int) -> list[dict[str, Any]]:
    """Be one rank: return a list of {what, copies, algorithm, seconds and prices by way}."""
    device, table, found = testkind.install(), GroupTable(name="composed"), []
    testkind.is_direct()
    table.transport = DirectTransport()
    own = device if TYPES[table.rank] == testkind.NAME else torch.device("cpu")
    value = torch.ones(TENSOR_BYTES // 4).to(own)
    for copies, pace in COPIES.items():
        with mock.patch.object(testkind, "copied_bytes_per_second", pace):
            cluster = Cluster.measure(table, device=TYPES[table.rank])
            found += [line | {"copies": copies} for line in _timed(value, cluster, table, rounds)]
    return found


def _sent_again() -> int:
    """Return how many TCP segments this node has sent again, which a slow link of little memory makes it do."""
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
    return int(dict(zip(names, values, strict=True))["RetransSegs"])


def _timed(value: Tensor, cluster: Cluster, table: GroupTable, rounds: int) -> list[dict[str, Any]]:
    found = []
    for what, (run, choose, composed, flat) in COLLECTIVES.items():
        algorithm = choose([RANKS], cluster, "auto")
        ways = {"composed": partial(run, value, algorithm, table), "flat": partial(run, value, FLAT, table)}
        prices = {"composed": composed(TENSOR_BYTES, RANKS, cluster), "flat": flat(TENSOR_BYTES, RANKS, cluster)}
        before = _sent_again()
        seconds = run_rounds(ways, rounds=rounds, warm_up=1)  # type: ignore[arg-type]
        again = sum(all_gather_object(table, _sent_again() - before)) // (
            len(RANKS) // 2
        )  # which two ranks of a node both count
        line = {"what": what, "algorithm": str(algorithm), "seconds": seconds, "prices": prices}
        found.append(line | {"sent_again": again})
    return found
