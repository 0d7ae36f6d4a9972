"""Clusters, models and published plans that planning is measured on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage

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
            pipelines.append(Pipeline(tuple(taken), share=rows, micro_batches=rows))
        return Plan(tuple(pipelines)) if pipelines else None


def llama(
    layers: int,
    hidden: int,
    feed_forward: int,
    rows: int,
    units: int = 8,
    length: int = LENGTH,
    vocabulary: int = 32000,
    width: int = 0,
) -> Profile:
    """Return what a decoder of so many layers costs in bf16, counted by hand: weights, attention, what is kept.

    `units` are its key-value heads, `width` is what they are wide together (an eighth of `hidden` if left out).
    """
    width = width or hidden // 8
    weights = hidden * (2 * hidden + 2 * width + 3 * feed_forward)
    flops = 2 * length * weights + 2 * length * length * hidden
    row, kept = 2 * length * hidden, length * (16 * hidden + 8 * feed_forward)
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
        sequence_traffic_bytes=5.0 * row,
        sequence_activation_bytes=0.25 * kept,
        gathered_bytes=4.0 * length * width,
        num_gathers=2,
    )
    table = 2.0 * vocabulary * hidden
    head = 2.0 * length * vocabulary * hidden
    before = PartCosts(traffic_bytes=row, parameter_bytes=table, split_parameter_bytes=table, num_ops=3)
    logits = 4.0 * length * vocabulary
    after = PartCosts(
        head, head, 0.0, 0.0, logits, logits, parameter_bytes=table, split_parameter_bytes=table, num_ops=8
    )
    boundaries = (float(row),) * (layers - 1)
    costs = ProgramCosts(rows, before, (block,) * layers, after, boundaries, units, sequence_units=length)
    return Profile(costs, length)


def small(rows: int) -> Profile:
    """Return a decoder of 7B parameters."""
    return llama(32, 4096, 11008, rows)


def cluster(
    counts: Mapping[str, int], rates: Mapping[int, float] | None = None, per_node: int = DEVICES_PER_NODE
) -> Cluster:
    """Return nodes of devices of one kind each, with public figures; NVLink inside, InfiniBand between them."""
    kinds = list(chain.from_iterable([kind] * count for kind, count in counts.items()))
    devices = [
        {"rank": rank, "kind": kind, "node": str(rank // per_node)}
        | ({"rate": rates[rank]} if rates and rank in rates else {})
        for rank, kind in enumerate(kinds)
    ]
    intra = {"bytes_per_second": 4e11, "latency_seconds": 1e-5}
    links = {"intra": intra, "inter": {"bytes_per_second": 5e10, "latency_seconds": 2e-5}}
    return Cluster.from_json({"format": "hetu_fx.cluster/1", "devices": devices, "links": links})


def cases(most: int) -> Iterator[Case]:
    """Yield the cases of up to so many devices."""
    for case in (*_narrow(), *_long(), *_published(), *_stragglers(), *_kinds()):
        if len(case.cluster.devices) <= most:
            yield case


def hard_cases(most: int) -> Iterator[Case]:
    """Yield cases of up to so many devices on which single searches are timed: many devices, and little memory."""
    straggling = cluster({"A800-80G": 4096}, {17: RATES[0]})
    kinds = ("V100-32G", "H20-96G", "A100-80G", "H800-80G")
    found = (
        Case("7B, 4096 A800, 1 straggles", straggling, small(4096)),
        Case("70B, 256 of 4 kinds", cluster(dict.fromkeys(kinds, 64)), llama(80, 8192, 28672, 256)),
    )
    yield from (case for case in found if len(case.cluster.devices) <= most)


def _narrow() -> Iterator[Case]:
    """Yield decoders of GPT-2's width on 8 devices, of one node and of two."""
    for layers in (2, 12):
        for per_node, name in ((8, "8"), (4, "2 x 4")):
            profile = llama(layers, 768, 2048, 16, units=12, length=1024)
            yield Case(f"width 768, {layers} layers, {name} A100", cluster({"A100-80G": 8}, None, per_node), profile)


def _long() -> Iterator[Case]:
    """Yield what fits only where sequences are shared: one row of 2^20 tokens, and 405B parameters with rows of 8k."""
    of_7b = llama(32, 4096, 11008, 1, units=32, length=1 << 20, width=4096)
    of_405b = llama(126, 16384, 53248, 2048, length=8192, vocabulary=128256, width=1024)
    yield Case("7B, one row of 1M tokens, 16 A100", cluster({"A100-80G": 16}), of_7b)
    yield Case("405B, rows of 8k tokens, 1024 H100", cluster({"H100-80G": 1024}), of_405b)


def _published() -> Iterator[Case]:
    """Yield the 14 plans of Hetu v2, section 6.2 and appendix C: 32B and 70B on H20 and H800, batches of 64 rows."""
    of_32b, of_70b = llama(60, 6656, 17920, 64), llama(80, 8192, 28672, 64)
    for number, (profile, h20, h800, plan) in enumerate(_plans(of_32b, of_70b), 1):
        counts = {"H20-96G": h20} | ({"H800-80G": h800} if h800 else {})
        name = f"{number}: {'32B' if profile is of_32b else '70B'}, {h20} H20" + (f" + {h800} H800" if h800 else "")
        yield Case(name, cluster(counts), profile, plan)


def _plans(of_32b: Profile, of_70b: Profile) -> Iterator[tuple[Profile, int, int, list[tuple[Stages, int]]]]:
    """Yield model, H20, H800, and pipelines of (blocks, devices, kind) with their micro-batches."""
    split = [(_on(4, 7, 7, fast=((23, 4), (23, 4))), 29), (_on(4, 11, 11, fast=((38, 4),)), 18)]
    uneven = [(_on(4, 6, 6, 6, fast=((21, 4), (21, 4))), 33), (_on(4, 6, 6, 6, fast=((22, 4), (13, 2), (7, 1))), 31)]
    lost = ((16, 4, "H20-96G"),) * 3 + ((8, 2, "H20-96G"), (4, 1, "H20-96G"))
    yield of_32b, 32, 16, [(_on(4, 11, 11, fast=((38, 4),)), 16)] * 4
    yield of_32b, 16, 16, [(_on(4, 7, 7, fast=((23, 4), (23, 4))), 32)] * 2
    yield of_32b, 24, 8, [(_on(4, 9, 10, 10, fast=((31, 4),)), 32)] * 2
    yield of_32b, 24, 16, [(_on(4, 6, 6, 6, fast=((21, 4), (21, 4))), 32)] * 2
    yield of_32b, 24, 15, [*split, (_on(4, 12, 11, fast=((24, 2), (13, 1))), 17)]
    yield of_32b, 24, 15, uneven
    yield of_70b, 32, 16, [(_on(8, 17, 17, fast=((46, 8),)), 32)] * 2
    yield of_70b, 24, 16, [(_on(8, 10, 10, 10, fast=((25, 8), (25, 8))), 64)]
    yield of_70b, 16, 16, [(_on(8, 11, 11, fast=((29, 8), (29, 8))), 64)]
    yield of_70b, 24, 8, [(_on(8, 16, 16, 16, fast=((32, 8),)), 64)]
    yield of_32b, 32, 16, [(_on(4, 5, 6, 6, 6, fast=((18, 4), (19, 4))), 32)] * 2
    yield of_32b, 32, 0, [(_on(4, 15, 15, 15, 15), 32)] * 2
    yield of_32b, 31, 0, [(_on(4, 15, 15, 15, 15), 33), (lost, 31)]
    yield of_32b, 24, 0, [(_on(4, 20, 20, 20), 32)] * 2


def _on(group: int, *blocks: int, fast: Sequence[tuple[int, int]] = ()) -> Stages:
    """Return stages on groups of H20, then some of (blocks, devices) on H800."""
    slow = [(count, group, "H20-96G") for count in blocks]
    return (*slow, *((count, size, "H800-80G") for count, size in fast))


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
