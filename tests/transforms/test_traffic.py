"""A golden count of communication: a transformer block talks as Megatron's does, and no more."""

from __future__ import annotations

from collections import Counter

import pytest

from hetu_fx.plans import Plan
from hetu_fx.switching.program import Program
from hetu_fx.transforms.device_graph import DeviceGraph
from hetu_fx.transforms.traffic import Traffic, communications, traffic_by_block
from tests.model_zoo import SAMPLES
from tests.transforms.plans import device_graph, pipeline, program_of

MEGATRON = Traffic({"all_reduce": 2}, {"all_reduce": 2})
PLANS = {
    "TP2": Plan.tensor_parallel((0, 1)),
    "TP2 2:1": Plan.tensor_parallel((0, 1), (2, 1)),
    "TP3": Plan.tensor_parallel((0, 1, 2)),
    "TP2 + TP1": Plan((pipeline((0, 1), rows=2), pipeline((2,)))),
}
DECODERS = ("llama", "gpt2", "bert", "vit")


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    return {name: program_of(SAMPLES[name].model().train(), SAMPLES[name].batch(4, 11)) for name in (*DECODERS, "t5")}


def blocks(program: Program, plan: Plan, rank: int = 0) -> dict[int | None, Traffic]:
    return traffic_by_block(device_graph(program, plan, rank), program.graph.block_paths)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_block_sums_twice_forward_and_twice_backward(programs: dict[str, Program], name: str, plan: str) -> None:
    found = blocks(programs[name], PLANS[plan])
    assert [found[block] for block in range(programs[name].graph.num_blocks)] == [MEGATRON, MEGATRON]


def test_a_decoder_block_with_cross_attention_sums_three_times(programs: dict[str, Program]) -> None:
    found = blocks(programs["t5"], PLANS["TP2"])
    assert [found[block].forward for block in range(4)] == [{"all_reduce": count} for count in (2, 2, 3, 3)]


def test_the_cotangent_of_the_encoder_is_summed_once_for_all_decoder_blocks(programs: dict[str, Program]) -> None:
    found = blocks(programs["t5"], PLANS["TP2"])
    assert (
        sum(traffic.backward.get("all_reduce", 0) for traffic in found.values()) == 2 + 2 + 3 + 3 + 1 + 1
    )  # and scores


def twice(device: DeviceGraph) -> list[str]:
    """Communications of one value with the same arguments."""
    calls = Counter((node.args[0], node.target, str(node.args[1:])) for node in communications(device))
    return [str(call) for call, count in calls.items() if count > 1]


@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_no_value_is_brought_into_the_same_state_twice(programs: dict[str, Program], name: str) -> None:
    for rank, plan in ((0, "TP2"), (1, "TP2 2:1"), (1, "TP2 + TP1")):
        assert twice(device_graph(programs[name], PLANS[plan], rank)) == []


def test_the_vocabulary_costs_a_sum_for_the_table_and_a_gather_and_a_sum_for_the_loss(
    programs: dict[str, Program],
) -> None:
    for name in ("llama", "gpt2"):
        found = blocks(programs[name], PLANS["TP2 2:1"])[None]
        assert found == Traffic({"all_reduce": 2, "all_gather": 1}, {"all_reduce": 1})


def test_one_device_and_replicas_talk_about_nothing(programs: dict[str, Program]) -> None:
    assert blocks(programs["llama"], Plan.single()) == {}
    assert blocks(programs["llama"], PLANS["TP2 + TP1"], rank=2) == {}


def test_traffic_is_written_in_words() -> None:
    assert str(MEGATRON) == "forward 2 all_reduce; backward 2 all_reduce"
    assert str(Traffic()) == "forward nothing; backward nothing"
