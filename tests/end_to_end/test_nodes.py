"""Training over two nodes of two ranks: exact with communication in two levels and hand-over by relays.

Gradients and parameters go in two levels too, beside the backward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.plans.plan import Plan, Stage
from hetu_fx.switching.step.compiled_plans import GraphVariant
from tests.end_to_end.twins import Twins, batch_of, one, world_of

NODES = Cluster.on_paper([1e9] * 4, nodes=("a", "a", "b", "b"), intra=Link(1e10), inter=Link(1e6))


def trained(plan: Plan) -> Twins:
    """Compare two steps with those of one device."""
    twins = Twins("llama", plan, world_of(4), cluster=NODES, data="global")
    for seed in range(2):
        twins.step(batch_of("llama", 4, seed=seed))
    return twins


def train(plan: Plan) -> str:
    """Compare two steps with those of one device; give the text of this rank's graphs."""
    twins = trained(plan)
    runtime = twins.model.hetu._runtime
    graphs = [
        str(stage.device.graph)
        for variant in runtime.variants.values()
        if isinstance(variant, GraphVariant)
        for stage in variant.compute.stages
        if stage.device is not None
    ]
    return "\n".join(graphs)


def check_tensor_parallel_across_nodes(rank: int, world: int, folder: Path) -> None:
    graph = train(Plan((one(Stage((0, 1, 2))),)))
    assert rank == 3 or "nodes 0,0,1 from 0" in graph


def check_a_pipeline_across_nodes(rank: int, world: int, folder: Path) -> None:
    graph = train(Plan((one(Stage((0, 1)), Stage((2, 3)), micro_batches=2),)))
    assert graph
    assert "nodes" not in graph


def check_unequal_replicas_across_nodes(rank: int, world: int, folder: Path) -> None:
    for zero in (0, 1):
        twins = trained(Plan((one(Stage((0,))), one(Stage((1,)), rows=2), one(Stage((2, 3)))), zero=zero))
        lanes = {(0, 2), (1, 2), (0, 3), (1, 3)}
        assert lanes & {created.ranks for created in twins.model.hetu.stats["groups"]}


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "check",
    [check_tensor_parallel_across_nodes, check_a_pipeline_across_nodes, check_unequal_replicas_across_nodes],
    ids=lambda check: check.__name__,
)
def test_on_two_nodes(check: Any, gloo_checks: Any) -> None:
    assert gloo_checks(__file__, 4)[check.__name__] == [None] * 4
