from dataclasses import replace

import pytest

from hetu_fx.planner.price.placement import BlockRange, Homes, chunk_instants, device_bytes, device_shards, join_shards
from hetu_fx.planner.values.device_memory import HeldShard, instants, peak
from hetu_fx.planner.values.exchanged_values import TiedParameter
from hetu_fx.planner.values.footprint import StageFootprint
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.schedule import Action, Phase, actions
from tests.planner.examples import transformer

COSTS = transformer(layers=4, rows=16)
EQUAL = dict.fromkeys(range(4), 1.0)


def test_states_are_spread_over_the_readers_of_each_part_by_speed() -> None:
    plan = Plan.data_parallel([0, 1])
    shards = device_shards(plan, COSTS, {0: 3.0, 1: 1.0})
    whole = COSTS.whole.parameter_bytes
    assert {rank: shard.owned for rank, shard in shards.items()} == pytest.approx({0: 0.75 * whole, 1: 0.25 * whole})
    assert {shard.copied for shard in shards.values()} == {whole}


def test_unequal_pipelines_own_together_what_the_program_has() -> None:
    front = Pipeline((Stage((0, 1), (3, 1), 3), Stage((2,), blocks=1)), share=3, micro_batches=2)
    shards = device_shards(Plan((front, Pipeline((Stage((3,)),)))), COSTS, EQUAL)
    assert shards[3].copied == COSTS.whole.parameter_bytes
    # the device that reads a quarter of what the pair splits owns no more than that
    assert sum(shard.owned for shard in shards.values()) == pytest.approx(COSTS.whole.parameter_bytes, rel=0.1)
    assert shards[0].owned > shards[1].owned


def test_readers_that_split_alike_own_their_shards_together_and_others_parts_of_the_whole() -> None:
    pair = Pipeline((Stage((0, 1), (3, 1)),))
    alike = device_shards(Plan((pair, Pipeline((Stage((2, 3), (3, 1)),)))), COSTS, EQUAL)
    split, whole = COSTS.whole.split_parameter_bytes, COSTS.whole.parameter_bytes
    assert alike[0].owned == pytest.approx(split * 3 / 8 + (whole - split) / 4)
    even = device_shards(Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)),)))), COSTS, EQUAL)
    assert [shard.owned for shard in even.values()] == pytest.approx([whole / 3] * 3)


def test_a_group_alone_copies_only_what_it_does_not_split() -> None:
    shards = device_shards(Plan.tensor_parallel([0, 1]), COSTS, EQUAL)
    common = COSTS.whole.parameter_bytes - COSTS.whole.split_parameter_bytes
    assert {shard.copied for shard in shards.values()} == {common}
    assert sum(shard.owned for shard in shards.values()) == COSTS.whole.parameter_bytes


def test_without_spreading_states_every_device_owns_what_it_reads() -> None:
    piece = BlockRange(COSTS, Stage((0,)), 0, 0, 4)
    shard = piece.shard(Homes(zero=0, num_copies=2))
    assert (shard.owned, shard.copied, shard.synced) == (piece.parameter_bytes, 0, piece.parameter_bytes)


def test_devices_that_share_the_sequence_copy_every_parameter_and_own_it_together() -> None:
    plan = Plan.context_parallel([0, 1], [3, 1])
    whole = COSTS.whole.parameter_bytes
    shards = device_shards(plan, COSTS, {0: 2.0, 1: 1.0})
    assert [shard.copied for shard in shards.values()] == [whole] * 2
    assert [shard.owned for shard in shards.values()] == pytest.approx([whole * 2 / 3, whole / 3])
    assert shards[0].footprint.kept[1] == pytest.approx(3 * shards[1].footprint.kept[1])
    without = device_shards(replace(plan, zero=0), COSTS, EQUAL)
    assert {(shard.copied, shard.owned, shard.synced) for shard in without.values()} == {(0, whole, whole)}


def test_groups_that_share_the_sequence_hold_their_shards_of_weights_and_parts_of_the_rest() -> None:
    stage = Stage((0, 1, 2, 3), (3, 1), context=2, context_ratios=(2, 1))
    shards = device_shards(Plan((Pipeline((stage,)),)), COSTS, EQUAL)
    group = device_shards(Plan.tensor_parallel([0, 1], [3, 1]), COSTS, EQUAL)
    assert [shards[i].parameters for i in range(4)] == pytest.approx([group[i % 2].parameters for i in range(4)])
    assert [shards[i].owned for i in range(4)] == pytest.approx([group[i % 2].parameters / 2 for i in range(4)])
    kept = [shards[i].footprint.kept[1] for i in range(4)]
    assert kept[0] == pytest.approx(2 * kept[2])
    assert kept[0] == pytest.approx(2 / 3 * group[0].footprint.kept[1])


def test_a_group_that_shares_the_sequence_keeps_less() -> None:
    plan = Plan.tensor_parallel([0, 1])
    plain, shared = (device_shards(replace(plan, sequence_parallel=on), COSTS, EQUAL)[0] for on in (False, True))
    assert shared.footprint.kept[1] < plain.footprint.kept[1]
    assert shared.parameters == plain.parameters


def test_stages_that_read_a_tied_parameter_each_copy_it_and_own_a_part() -> None:
    table = COSTS.before.parameter_bytes
    tied = replace(COSTS, after=replace(COSTS.after, parameter_bytes=0.0), tied=(TiedParameter(table, 0.0, (0, 5)),))
    plan = Plan((Pipeline((Stage((0,), blocks=2), Stage((1,), blocks=2))),))
    shards = device_shards(plan, tied, {0: 3.0, 1: 1.0})
    assert [shard.copied for shard in shards.values()] == [table, table]
    assert [shard.synced for shard in shards.values()] == [table, table]
    assert sum(shard.owned for shard in shards.values()) == tied.whole.parameter_bytes
    assert shards[0].parameters == shards[1].parameters == COSTS.stage(0, 2).parameter_bytes
    assert device_shards(Plan.single(), tied, EQUAL)[0].copied == 0


def test_front_stages_of_1f1b_and_all_of_gpipe_hold_more_activations() -> None:
    pipeline = Pipeline((Stage((0,)), Stage((1,))), micro_batches=8)
    once = device_bytes(Plan((pipeline,)), COSTS, EQUAL)
    all_at_once = device_bytes(Plan((pipeline,), schedule="gpipe"), COSTS, EQUAL)
    assert dict(once[0])["activations"] > dict(once[1])["activations"]
    assert dict(all_at_once[0])["activations"] >= 3 * dict(once[0])["activations"]


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
    found = join_shards([shard(1.0, 30.0, handed=2.0), replace(shard(2.0, 50.0), copied=7.0)])
    assert (found.parameters, found.owned, found.copied, found.handed) == (80.0, 80.0, 7.0, 2.0)
