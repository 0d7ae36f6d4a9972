"""Attention by an exchange of tokens for heads: as one device, what travels, and where it cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.captured_program import PlannedProgram
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.values.options import Choice
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from tests.transforms.cases import batch_of
from tests.transforms.plans import deduced, device_graph, program_of, same_in_group, talk
from tests.transforms.test_finer import group, grouped

pytestmark = pytest.mark.usefixtures("losses_in_double")


def by_heads(*ratios: int) -> Plan:
    return replace(Plan.context_parallel(range(len(ratios)), ratios), attention="heads")


@pytest.mark.parametrize("ratios", [(1, 1), (3, 1), (2, 1, 1), (1, 2, 1, 4)])
def test_tokens_and_heads_in_any_ratio_compute_as_one_device(ratios: tuple[int, ...]) -> None:
    program, model = grouped(8, 4)
    same_in_group(program, model, by_heads(*ratios), batch_of("llama", 7), limit=1e-10)


def test_queries_keys_values_and_what_attention_makes_are_exchanged_and_nothing_is_gathered() -> None:
    program, _ = grouped(8, 4)
    sent = [line.split(" [")[0] for line in talk(device_graph(program, by_heads(3, 1), 1))]
    assert sent.count("all_to_all") == 4 * program.graph.num_blocks
    assert set(sent) == {"local_slice", "all_to_all", "all_reduce"}


def test_fewer_heads_than_devices_and_grids_are_refused() -> None:
    program, _ = grouped(8, 2)
    with pytest.raises(PlanError, match="cannot split a dimension of"):
        deduced(program, by_heads(*(1,) * 16))
    with pytest.raises(PlanError, match="tensor parallel groups split the heads already"):
        deduced(program, replace(group(1, 1, context=2), attention="heads"))


def test_it_is_proposed_by_speed_where_that_is_faster_and_trains_as_one_device() -> None:
    program, model = grouped(8, 4)
    long = program_of(model, batch_of("llama", 512))
    costs, cluster = program_costs(long, rows=1), Cluster.on_paper([4e9, 2e9, 1e9, 1e9], intra=Link(1e8))
    choice = Choice.of(forbid=("pipeline", "tensor_parallel", "recompute"))
    plan = PlannedProgram(long, costs).plan(cluster, "auto", "contiguous", choice=choice)
    assert plan.attention == "heads"
    assert "heads attention" in str(plan)
    assert len(set(plan.pipelines[0].stages[0].ratios)) > 1
    same_in_group(program, model, plan, batch_of("llama", 7), limit=1e-10)
    ways = [predict(replace(plan, attention=one), costs, cluster).devices[0] for one in ("heads", "gathered")]
    sent, other = (dict(device.seconds)["tensor_parallel"] for device in ways)
    assert 0 < sent < other


def test_four_values_of_a_block_are_counted_as_exchanged() -> None:
    costs = program_costs(grouped(8, 4)[0])
    block, by_heads = costs.blocks[0], costs.in_heads.by_sequence.blocks[0]
    assert (costs.head_units, block.num_head_exchanges, by_heads.num_exchanges) == (4, 4, 4)
    assert block.heads_bytes == by_heads.exchanged_bytes == 3 * block.gathered_bytes  # queries have twice the heads
    assert (by_heads.reduced_bytes, by_heads.num_reductions) == (0, 0)
    profile = Profile(costs)
    assert Profile.from_json(profile.to_json()) == profile


def test_what_is_recomputed_keeps_what_was_exchanged() -> None:
    costs = program_costs(grouped(8, 4)[0])
    (stage,) = by_heads(1, 1).pipelines[0].stages
    kept = {ways: costs.attending(ways).kept_by(stage.recomputing(1), 0) for ways in ("ring", "heads")}
    lines = {ways: one.footprint(0, costs.num_blocks, 0.5).kept.slope for ways, one in kept.items()}
    assert lines["heads"] > lines["ring"]
