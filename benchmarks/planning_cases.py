"""Clusters, models and published plans that planning is measured on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from hetu_fx.planner.profile_file import Profile
from hetu_fx.planner.program import PartCosts, ProgramCosts
from hetu_fx.plans import Pipeline, Plan, Stage
from hetu_fx.topology import Cluster

DEVICES_PER_NODE = 8
LENGTH = 4096
RATES = (2.57, 5.63, 12.53)

Stages = Sequence[tuple[int, int, str]]
"""Of a published pipeline: the blocks, the devices and their kind of each stage."""


@dataclass(frozen=True)
class Case:
    """A question to the planner, with the plan that was published for it, if one was."""

    name: str
    cluster: Cluster
    profile: Profile
    published: Sequence[tuple[Stages, int]] = ()

    @property
    def published_plan(self) -> Plan | None:
        """Return the published plan on the devices of the cluster; a micro-batch per row."""
        free: dict[str, list[int]] = {}
        for device in self.cluster.devices:
            free.setdefault(device.kind, []).append(device.rank)
        pipelines = []
        for stages, rows in self.published:
            taken = []
            for blocks, size, kind in stages:
                taken.append(Stage(tuple(free[kind][:size]), blocks=blocks))
                del free[kind][:size]
            pipelines.append(Pipeline(tuple(taken), rows=rows, micro_batches=rows))
        return Plan(tuple(pipelines)) if pipelines else None


def llama(layers: int, hidden: int, feed_forward: int, rows: int, units: int = 8) -> Profile:
    """Return what a decoder of so many layers costs in bf16, counted by hand: weights, attention, what is kept."""
    weights = hidden * (2.25 * hidden + 3 * feed_forward)
    flops = 2 * LENGTH * weights + 2 * LENGTH * LENGTH * hidden
    row, kept = 2 * LENGTH * hidden, LENGTH * (16 * hidden + 8 * feed_forward)
    block = PartCosts(
        flops=flops,
        split_flops=flops,
        traffic_bytes=10.0 * row,
        split_traffic_bytes=5.0 * row,
        activation_bytes=kept,
        split_activation_bytes=0.75 * kept,
        parameter_bytes=2 * weights,
        split_parameter_bytes=2 * weights,
        reduced_bytes=2.0 * row,
        num_reductions=2,
        returned_bytes=2.0 * row,
        num_returns=2,
        num_ops=40,
    )
    table = 2.0 * 32000 * hidden
    head = 2.0 * LENGTH * 32000 * hidden
    before = PartCosts(traffic_bytes=row, parameter_bytes=table, num_ops=3)
    after = PartCosts(head, activation_bytes=4.0 * LENGTH * 32000, parameter_bytes=table, num_ops=8)
    boundaries = (float(row),) * (layers - 1)
    return Profile(ProgramCosts(rows, before, (block,) * layers, after, boundaries, units), LENGTH)


def small(rows: int) -> Profile:
    """Return a decoder of 7B parameters."""
    return llama(32, 4096, 11008, rows)


def cluster(counts: Mapping[str, int], rates: Mapping[int, float] | None = None) -> Cluster:
    """Return nodes of 8 devices of one kind each, with public figures; NVLink inside, InfiniBand between them."""
    kinds = list(chain.from_iterable([kind] * count for kind, count in counts.items()))
    devices = [
        {"rank": rank, "kind": kind, "node": str(rank // DEVICES_PER_NODE)}
        | ({"rate": rates[rank]} if rates and rank in rates else {})
        for rank, kind in enumerate(kinds)
    ]
    intra = {"bytes_per_second": 4e11, "latency_seconds": 1e-5}
    links = {"intra": intra, "inter": {"bytes_per_second": 5e10, "latency_seconds": 2e-5}}
    return Cluster.from_json({"format": "hetu_fx.cluster/1", "devices": devices, "links": links})


def cases(most: int) -> Iterator[Case]:
    """Yield the cases of up to so many devices."""
    for case in (*_published(), *_stragglers(), *_kinds()):
        if len(case.cluster.devices) <= most:
            yield case


def _published() -> Iterator[Case]:
    """Yield plans of Hetu v2, section 6.2 and appendix C: 32B and 70B on H20 and H800, batches of 64 rows."""
    of_32b, of_70b = llama(60, 6656, 17920, 64), llama(80, 8192, 28672, 64)
    h20, h800 = "H20-96G", "H800-80G"
    both = [((11, 4, h20), (11, 4, h20), (38, 4, h800))] * 4
    half = [((7, 4, h20), (7, 4, h20), (23, 4, h800), (23, 4, h800))] * 2
    more = [((6, 4, h20), (6, 4, h20), (6, 4, h20), (21, 4, h800), (21, 4, h800))] * 2
    large = [((17, 8, h20), (17, 8, h20), (46, 8, h800))] * 2
    even = [((15, 4, h20),) * 4] * 2
    for name, profile, counts, plan in (
        ("32B, 32 H20 + 16 H800", of_32b, {h20: 32, h800: 16}, both),
        ("32B, 16 H20 + 16 H800", of_32b, {h20: 16, h800: 16}, half),
        ("32B, 24 H20 + 16 H800", of_32b, {h20: 24, h800: 16}, more),
        ("70B, 32 H20 + 16 H800", of_70b, {h20: 32, h800: 16}, large),
        ("32B, 32 H20", of_32b, {h20: 32}, even),
    ):
        yield Case(name, cluster(counts), profile, [(stages, 64 // len(plan)) for stages in plan])


def _stragglers() -> Iterator[Case]:
    """Yield Malleus' situations: 1, 3 or 16 devices that straggle at its levels, the same every time."""
    for devices in (8, 16, 64, 256, 1024):
        for count in (1, 3, 16):
            if count <= devices // 4:
                chosen = random.Random(devices + count)
                rates = {rank: chosen.choice(RATES) for rank in sorted(chosen.sample(range(devices), count))}
                name = f"7B, {devices} A800, {count} straggle"
                yield Case(name, cluster({"A800-80G": devices}, rates), small(max(64, devices)))


def _kinds() -> Iterator[Case]:
    for devices in (8, 16, 64, 256, 1024, 4096):
        for kinds in (("A100-80G",), ("A100-80G", "V100-32G"), ("V100-32G", "H20-96G", "A100-80G", "H800-80G")):
            counts = dict.fromkeys(kinds, devices // len(kinds))
            yield Case(f"7B, {devices} of {len(kinds)} kinds", cluster(counts), small(max(64, devices)))
