"""A golden count of communication: a transformer block talks as Megatron's does, and no more."""

from __future__ import annotations

from collections import Counter

import pytest

from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.transforms.lowering.graph_traffic import communications
from hetu_fx.transforms.specialize.device_graph import DeviceGraph
from tests.oracles.traffic import Traffic, traffic_by_block
from tests.transforms.plans import device_graph, pipeline, zoo_program

MEGATRON = Traffic({"all_reduce": 2}, {"all_reduce": 2})
PLANS = {
    "TP2": Plan.tensor_parallel((0, 1)),
    "TP2 2:1": Plan.tensor_parallel((0, 1), (2, 1)),
    "TP3": Plan.tensor_parallel((0, 1, 2)),
    "TP2 + TP1": Plan((pipeline((0, 1), rows=2), pipeline((2,)))),
}
DECODERS = ("llama", "gpt2", "bert", "vit")


def blocks(program: Program, plan: Plan, rank: int = 0) -> dict[int | None, Traffic]:
    return traffic_by_block(device_graph(program, plan, rank), program.graph.block_paths)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_block_sums_twice_forward_and_twice_backward(name: str, plan: str) -> None:
    found = blocks(zoo_program(name), PLANS[plan])
    assert [found[block] for block in range(zoo_program(name).graph.num_blocks)] == [MEGATRON, MEGATRON]


def test_a_decoder_block_with_cross_attention_sums_three_times() -> None:
    found = blocks(zoo_program("t5"), PLANS["TP2"])
    assert [found[block].forward for block in range(4)] == [{"all_reduce": count} for count in (2, 2, 3, 3)]


def test_the_cotangent_of_the_encoder_is_summed_once_for_all_decoder_blocks() -> None:
    found = blocks(zoo_program("t5"), PLANS["TP2"])
    assert (
        sum(traffic.backward.get("all_reduce", 0) for traffic in found.values()) == 2 + 2 + 3 + 3 + 1 + 1
    )  # and scores


def twice(device: DeviceGraph) -> list[str]:
    """Communications of one value with the same arguments."""
    calls = Counter((node.args[0], node.target, str(node.args[1:])) for node in communications(device))
    return [str(call) for call, count in calls.items() if count > 1]


@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_no_value_is_brought_into_the_same_state_twice(name: str) -> None:
    for rank, plan in ((0, "TP2"), (1, "TP2 2:1"), (1, "TP2 + TP1")):
        assert twice(device_graph(zoo_program(name), PLANS[plan], rank)) == []


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_vocabulary_costs_a_sum_for_the_table_and_a_gather_and_a_sum_for_the_loss(name: str) -> None:
    found = blocks(zoo_program(name), PLANS["TP2 2:1"])[None]
    assert found == Traffic({"all_reduce": 2, "all_gather": 1}, {"all_reduce": 1})


def test_one_device_and_replicas_talk_about_nothing() -> None:
    assert blocks(zoo_program("llama"), Plan.single()) == {}
    assert blocks(zoo_program("llama"), PLANS["TP2 + TP1"], rank=2) == {}


def test_traffic_is_written_in_words() -> None:
    assert str(MEGATRON) == "forward 2 all_reduce; backward 2 all_reduce"
    assert str(Traffic()) == "forward nothing; backward nothing"
