from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.errors import PlanError
from hetu_fx.plans.parts import DeviceDeal, PartedPipeline
from hetu_fx.plans.plan import Pipeline, Plan, Stage

TWO_STAGES = Plan((Pipeline((Stage((0, 1), blocks=5), Stage((2,), blocks=3)), micro_batches=4),))


def interleaved(chunks: int = 2, **changes: Any) -> Plan:
    return replace(TWO_STAGES, schedule="interleaved", chunks=chunks, **changes)


@given(st.integers(1, 6), st.integers(1, 4))
def test_every_part_is_one_chunk_of_one_stage(num_stages: int, chunks: int) -> None:
    deal = DeviceDeal(num_stages, chunks)
    assert DeviceDeal.of(deal.num_parts, chunks) == deal
    assert [deal.part(deal.stage(k), deal.chunk(k)) for k in range(deal.num_parts)] == list(range(deal.num_parts))
    held = [part for stage in range(num_stages) for part in deal.held(stage)]
    assert sorted(held) == list(range(num_stages * chunks))
    assert all(deal.stage(part) == stage for stage in range(num_stages) for part in deal.held(stage))


def test_parts_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(PlanError, match="5 parts cannot be dealt out in 2 chunks per stage"):
        DeviceDeal.of(5, 2)
    with pytest.raises(PlanError, match="0 stages cannot hold 1 parts each"):
        DeviceDeal(0)


def test_blocks_are_dealt_out_round_by_round_over_the_stages() -> None:
    (found,) = interleaved().parts(8)
    assert [(part.devices, part.blocks) for part in found.parts] == [((0, 1), 3), ((2,), 2), ((0, 1), 2), ((2,), 1)]
    assert found.blocks == (3, 2, 2, 1)
    assert found.stops == (0, 3, 5, 7, 8)
    assert list(found.ranges) == [(0, 3), (3, 5), (5, 7), (7, 8)]
    assert (found.pipeline, found.micro_batches) == (TWO_STAGES.pipelines[0], 4)


def test_a_stage_that_is_alone_stays_whole_beside_pipelines_in_chunks() -> None:
    alone = Pipeline((Stage((3,)),))
    first, second = interleaved(pipelines=(*TWO_STAGES.pipelines, alone)).parts(8)
    assert (first.deal, second.deal) == (DeviceDeal(2, 2), DeviceDeal(1, 1))
    assert second.parts == (Stage((3,), blocks=8),)


def test_without_chunks_parts_are_the_stages_with_their_blocks_written_out() -> None:
    (found,) = TWO_STAGES.parts(8)
    assert found.parts == TWO_STAGES.pipelines[0].stages
    (even,) = Plan((Pipeline((Stage((0,)), Stage((1,)))),)).parts(5)
    assert even.parts == (Stage((0,), blocks=3), Stage((1,), blocks=2))


@given(st.lists(st.integers(2, 6), min_size=2, max_size=4), st.integers(1, 2), st.data())
def test_what_stages_hold_and_recompute_is_what_their_parts_do(
    blocks: list[int], chunks: int, data: st.DataObject
) -> None:
    again = [data.draw(st.integers(0, count)) for count in blocks]
    stages = tuple(Stage((i,), blocks=count, recompute=again[i]) for i, count in enumerate(blocks))
    found = PartedPipeline.of(Pipeline(stages), sum(blocks), chunks)
    for number, count in enumerate(blocks):
        held = [found.parts[part] for part in found.deal.held(number)]
        assert sum(part.blocks or 0 for part in held) == count
        assert sum(part.recompute for part in held) == again[number]
        assert sum(len(found.recomputed(part)) for part in found.deal.held(number)) == again[number]


def test_the_first_blocks_of_a_stage_are_recomputed_whichever_chunk_they_are_in() -> None:
    stages = Stage((0,), recompute=3, recompute_ops="pointwise"), Stage((1,))
    found = PartedPipeline.of(Pipeline(stages), 8, 2)
    assert [(part.recompute, part.recompute_ops) for part in found.parts] == [
        (2, "pointwise"),
        (0, "all"),
        (1, "pointwise"),
        (0, "all"),
    ]
    assert [list(found.recomputed(part)) for part in range(4)] == [[0, 1], [], [4], []]


def test_a_model_without_blocks_is_dealt_out_too() -> None:
    found = PartedPipeline.of(Pipeline((Stage((0,)), Stage((1,)))), 0, 2)
    assert found.stops == (0, 0, 0, 0, 0)
    assert [part.devices for part in found.parts] == [(0,), (1,), (0,), (1,)]
