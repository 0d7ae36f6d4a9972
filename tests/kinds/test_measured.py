"""Devices of several types on one node are measured: what links those of one type, and what links the types."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.measure import measure_ways
from hetu_fx.cluster.topology import TYPE
from hetu_fx.comm_ops.wire.groups import GroupTable
from tests.kinds import testkind
from tests.spawned import results_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def measured(rank: int, folder: Path, types: list[str], results: Any) -> None:
    warnings.simplefilter("ignore")
    testkind.install()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(types))
    cluster = Cluster.measure(seconds=0.1, device=types[rank])
    ways = measure_ways(GroupTable(), cluster.nodes, types, types[rank], all_ways=True)
    results.put((rank, replace(cluster, ways=ways).to_json()))
    dist.barrier()


def test_a_node_of_two_types_has_a_level_between_a_device_and_its_node(tmp_path: Path) -> None:
    types = [testkind.NAME, "cpu", "cpu"]
    found = results_of(measured, 3, tmp_path, types, seconds=180)
    assert found[0] == found[1] == found[2]
    cluster = Cluster.from_json(found[0])
    assert [level.within for level in cluster.levels] == [TYPE, "node", "cluster"]
    assert [device.place for device in cluster.devices] == [{TYPE: kind} for kind in types]
    assert [device.kind for device in cluster.devices] == types
    assert cluster.tiers((0, 1, 2))[0] == (0, 1, 1)
    assert cluster.devices[0].memory_bytes == testkind.MEMORY_BYTES
    assert [(way.way, way.types, way.where) for way in cluster.ways] == [
        ("staged", ("cpu", testkind.NAME), "intra"),
        ("direct", ("cpu", "cpu"), "intra"),
    ]
