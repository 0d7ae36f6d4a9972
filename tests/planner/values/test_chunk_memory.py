"""Devices whose stages are in chunks: what they hold when they hold most."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.planner.values.chunk_memory import chunk_instants, joined
from hetu_fx.planner.values.device_memory import HeldShard, instants, peak
from hetu_fx.planner.values.footprint import StageFootprint
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.schedule import Action, Phase, actions


def shard(kept: float, parameters: float = 100.0, handed: float = 0.0) -> HeldShard:
    """Return a shard that keeps so many bytes per row, and holds a tenth more while a micro-batch passes."""
    lines = (Line(slope=1.1 * kept),)
    return HeldShard(parameters, parameters, 0.0, 0.0, StageFootprint(Line(slope=kept), lines, lines, lines), handed)


@pytest.mark.parametrize("stage", range(4))
def test_the_first_stages_keep_most_as_in_megatron(stage: int) -> None:
    # two for each stage behind, a round through all chunks but the last, and the one that passes
    chunks, stages, count = 2, 4, 8
    order = actions("interleaved", stage, stages, count, chunks)
    found = dict(peak(chunk_instants([shard(10.0)] * chunks, order, count), 1))
    others = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    assert found["activations"] == 10 * others + 11


def test_a_chunk_that_keeps_more_counts_with_what_is_in_flight_of_it() -> None:
    # of 2 stages the first one has F0 F0 F1 F1 F0 before the first backward, of chunk 1
    found = dict(peak(chunk_instants([shard(10.0), shard(1000.0)], actions("interleaved", 0, 2, 2, 2), 2), 1))
    assert found["activations"] == 2 * 10 + 1000 + 1100


def test_a_micro_batch_whose_weights_wait_is_kept_until_they_are_made() -> None:
    # the last of 2 stages has F0 F0 F1 I1, then F1 before the weights of I1 with B1 and F0 I0 ...
    order = actions("zero-bubble", 1, 2, 4, 2)
    waiting, most = 0, 0
    for action in order:
        waiting += (action.phase is Phase.FORWARD) - (action.phase in (Phase.BACKWARD, Phase.WEIGHT_GRADIENT))
        most = max(most, waiting)
    found = dict(peak(chunk_instants([shard(10.0)] * 2, order, 4), 1))
    whole = dict(peak(chunk_instants([shard(10.0)] * 2, actions("interleaved", 1, 2, 4, 2), 4), 1))
    assert found["activations"] == 10 * (most - 1) + 11
    assert found["activations"] > whole["activations"]


def test_gradients_of_weights_that_wait_are_there_once_they_are_made() -> None:
    early = Action(Phase.FORWARD, 0), Action(Phase.INPUT_GRADIENT, 0)
    late = Action(Phase.WEIGHT_GRADIENT, 0)
    nothing_kept = [shard(0.0, 100.0)]
    made = [one for one in chunk_instants(nothing_kept, (*early, late), 1) if one.name in set(Phase)]
    assert [dict(one.at(1))["gradients"] + dict(one.at(1))["activations"] for one in made] == [0, 0, 100]


def test_one_chunk_is_a_stage_that_is_whole() -> None:
    one = shard(10.0, handed=3.0)
    for stage, rows in ((0, 5), (1, 1)):
        whole = peak(instants(one, 3 - stage, 6), rows)
        assert peak(chunk_instants([one], actions("1f1b", stage, 3, 6), 6), rows) == whole


def test_what_lasts_adds_up() -> None:
    found = joined([shard(1.0, 30.0, handed=2.0), replace(shard(2.0, 50.0), copied=7.0)])
    assert (found.parameters, found.owned, found.copied, found.handed) == (80.0, 80.0, 7.0, 2.0)
