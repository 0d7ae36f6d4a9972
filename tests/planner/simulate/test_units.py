"""Simulated steps where devices share links of racks and ports, not of nodes alone."""

from __future__ import annotations

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.topology import Level
from hetu_fx.planner.price.step import PricedStep
from hetu_fx.planner.simulate.simulate import simulate, simulated_seconds
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.cluster.test_topology import GB, racks, rails
from tests.planner.examples import transformer

COSTS = transformer(layers=4, rows=16, width=512)


def staged(*pipelines: tuple[int, ...]) -> Plan:
    made = (Pipeline(tuple(Stage((rank,)) for rank in ranks), micro_batches=4) for ranks in pipelines)
    return Plan(tuple(made)).with_blocks(4)


def test_a_step_says_how_busy_racks_and_ports_are() -> None:
    step = simulate(Plan.data_parallel(range(16)).with_blocks(4), COSTS, racks())
    assert {use.link for use in step.links} >= {"out of rack 0", "into rack 1", "out of node 0"}
    step = simulate(Plan.data_parallel(range(8)).with_blocks(4), COSTS, rails(ports=2))
    assert any(use.link.startswith("out of port") for use in step.links)


@pytest.mark.parametrize("cluster", [racks(), rails(ports=2), rails()], ids=["racks", "two ports", "rails"])
def test_pipelines_that_see_alike_racks_and_ports_are_one(cluster: Cluster) -> None:
    half = len(cluster.ranks) // 2
    plan = staged(*((rank, rank + half) for rank in range(half)))
    whole = simulate(plan, COSTS, cluster).seconds
    assert simulated_seconds(plan, COSTS, cluster) == pytest.approx(whole, rel=1e-9)


def test_one_port_for_all_devices_of_a_node_is_slower_than_one_for_each() -> None:
    plan = staged(*((rank, rank + 4) for rank in range(4)))
    shared, own = (simulated_seconds(plan, COSTS, rails(ports=ports)) for ports in (1, 4))
    assert shared > own
    assert PricedStep(plan, COSTS, rails(ports=1)).end_seconds >= PricedStep(plan, COSTS, rails(ports=4)).end_seconds


def test_a_narrow_rack_slows_what_crosses_it() -> None:
    plan = staged((0, 8), (4, 12))
    narrow = (*racks().levels[:3], Level("cluster", GB, 1e-5, "rack"))
    slow = Cluster(racks().devices, racks().intra, racks().inter, levels=narrow)
    assert simulated_seconds(plan, COSTS, slow) > simulated_seconds(plan, COSTS, racks())
