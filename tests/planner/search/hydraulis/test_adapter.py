from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plan, make_plans
from hetu_fx.planner.search.hydraulis.adapter import (
    SchemeShape,
    devices_by_kind,
    fitting_schemes,
    typical_batch,
    variant_plan,
    variants,
)
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import BlockTime, Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from tests.planner.examples import paper, transformer

BLOCKS, A, KEPT, HANDED = 4, 100.0, 60.0, 4.0
LENGTHS = (128, 512, 2048)


def program(length: int) -> ProgramCosts:
    flops = length * (A + length)
    block = PartCosts(
        flops=flops,
        split_flops=flops,
        activation_bytes=KEPT * length,
        sequence_activation_bytes=KEPT * length,
        traffic_bytes=0.0,
    )
    boundaries = (HANDED * length,) * (BLOCKS - 1)
    nothing = PartCosts()
    return ProgramCosts(8, nothing, (block,) * BLOCKS, nothing, boundaries, 8, sequence_units=8)


def problem(*speeds: float, tokens: float = 1e9, longest: int = 2048, **options: bool) -> Problem:
    """Return what is asked for devices of these speeds, each with memory for what so many tokens keep."""
    lengths = tuple((length, program(length)) for length in LENGTHS[:-1])
    profile = Profile(program(2048), tokens_per_row=2048, other_lengths=lengths, sequences={128: 20.0, longest: 1.0})
    memory = int(tokens * BLOCKS * KEPT)
    free = Link(1e30, 0.0)
    cluster = Cluster.on_paper(list(speeds), memory_bytes=memory, intra=free, inter=free)
    return Problem(profile, cluster, PlanOptions(memory_fraction=1.0, **options))


def by_name(asked: Problem) -> dict[str, tuple[float, float, int]]:
    """Return a and b of each scheme, and the tokens that it holds."""
    return {str(one): (one.times.a, one.times.b, one.max_length) for one in fitting_schemes(asked)}


def test_groups_that_share_tokens_take_their_part_of_the_time_and_hold_as_many_times_as_much() -> None:
    found = by_name(problem(1.0, 1.0, 1.0, 1.0, tokens=1024, longest=512))
    alone, two, four = (found[name] for name in ("<tp 1, pp 1>", "<tp 1, cp 2, pp 1>", "<tp 1, cp 4, pp 1>"))
    assert alone == (pytest.approx(3 * BLOCKS), pytest.approx(3 * BLOCKS * A), 1024)
    assert two == (pytest.approx(alone[0] / 2), pytest.approx(alone[1] / 2), 2048)
    assert four == (pytest.approx(alone[0] / 4), pytest.approx(alone[1] / 4), 4096)
    assert "<tp 2, cp 2, pp 1>" in found
    forbidden = by_name(problem(1.0, 1.0, context_parallel=False))
    assert not any("cp" in name for name in forbidden)


def test_what_has_no_room_for_the_longest_computes_its_blocks_again() -> None:
    """All that is kept of a token is then what each block but the first got, and while one is computed its own."""
    found = by_name(problem(1.0, tokens=1024, longest=2048))
    plain, again = found["<tp 1, pp 1>"], found["<tp 1, pp 1, recomputed>"]
    assert plain[2] == 1024
    assert again[0] == pytest.approx(plain[0] * 4 / 3)
    assert again[1] == pytest.approx(plain[1] * 4 / 3)
    assert again[2] > plain[2]
    assert by_name(problem(1.0, tokens=1024, longest=1024)).keys() == {"<tp 1, pp 1>"}
    assert by_name(problem(1.0, tokens=1024, longest=2048, recompute=False)).keys() == {"<tp 1, pp 1>"}


def test_unequal_devices_share_by_speed_and_the_last_to_hold_a_row_counts() -> None:
    """Speeds 3 and 1: of 8 parts the fast one has 6, which takes it as long as 2 take the other."""
    asked = problem(3.0, 1.0, tokens=1024, longest=512)
    fast, slow = (devices[0] for devices in devices_by_kind(asked.cluster))
    assert SchemeShape((1, 1), 1).stage((fast, slow), BLOCKS, asked.costs).ratios == (3, 1)
    found = by_name(asked)
    of_fast, of_slow = found["<tp 1, pp 1, of 1 + 0>"], found["<tp 1, pp 1, of 0 + 1>"]
    assert of_slow[0] == pytest.approx(3 * of_fast[0])
    heads, tokens = found["<tp 2, pp 1, of 1 + 1>"], found["<tp 1, cp 2, pp 1, of 1 + 1>"]
    assert heads[0] == tokens[0] == pytest.approx(of_slow[0] / 4)
    assert tokens[2] == 1280, "the fast one has memory for 1024 tokens, 3 / 4 of the row's 1365, in whole blocks of 128"
    assert heads[2] == 1024, "what is kept is no part of what heads split"


def test_a_pool_of_unequal_devices_has_plans_that_run_on_them() -> None:
    asked = problem(3.0, 3.0, 1.0, 1.0, tokens=1024, longest=2048)
    strategies = [variant.strategy for variant in variants(asked)]
    assert all(sum(s.by_kind[0] for s in one.pipelines) <= 2 for one in strategies)
    assert strategies[-1].max_length >= 2048
    plans = make_plans(asked, "hydraulis")
    for plan in plans:
        plan.check(num_blocks=BLOCKS, world_size=4)
    longest = plans[-1].pipelines[0]
    assert any(stage.shares_sequence or stage.recompute for stage in longest.stages)


def test_a_pool_recomputes_only_where_its_options_let_it() -> None:
    asked = problem(1.0, 1.0, tokens=700, longest=2048, context_parallel=False, tensor_parallel=False)
    assert any(plan.recomputes for plan in make_plans(asked, "hydraulis"))
    never = replace(asked, options=replace(asked.options, recompute=False))
    assert variants(never) == ()


def test_devices_that_differ_a_little_are_of_one_kind_which_is_as_slow_as_its_slowest() -> None:
    asked = problem(1.0, 0.95, 0.5, tokens=1024, longest=512)
    assert [[device.rank for device in devices] for devices in devices_by_kind(asked.cluster)] == [[0, 1], [2]]
    assert by_name(asked)["<tp 1, pp 1, of 1 + 0>"][0] == pytest.approx(3 * BLOCKS / 0.95)


def test_of_too_many_unlike_devices_no_pool_is_made() -> None:
    asked = problem(*[1.0] * 40, *[0.5] * 40)
    with pytest.raises(PlanError, match=r"too many ways to choose among 40 \+ 40 devices of 2 kinds \(over 600\)"):
        make_plans(asked, "hydraulis")


def model(length: int) -> ProgramCosts:
    return transformer(layers=8, rows=32, length=length, width=256, units=8)


PROFILE = Profile(
    model(1024),
    tokens_per_row=1024,
    other_lengths=((256, model(256)), (8192, model(8192))),
    sequences={128: 40.0, 512: 30.0, 2048: 4.0, 8192: 1.0},
)
STATES = 4 * PROFILE.costs.whole.parameter_bytes
ROW = model(8192).whole.activation_bytes


def eight(memory_bytes: float = STATES + 0.7 * ROW) -> Cluster:
    return paper(*[1000] * 8, memory_bytes=int(memory_bytes), nodes="aaaabbbb")


PROBLEM = Problem(PROFILE, eight())


def test_long_sequences_get_a_large_pipeline_and_short_ones_small_ones() -> None:
    found = variants(PROBLEM)
    assert [v.longest for v in found] == sorted(v.longest for v in found)
    assert found[-1].longest == 8192
    last = found[-1].strategy.pipelines
    assert last[0].max_length >= 8192 > last[-1].max_length
    assert all(scheme.devices == 1 for scheme in found[0].strategy.pipelines)


def test_the_answer_is_a_plan_for_each_longest_sequence() -> None:
    plans = make_plans(PROBLEM, "hydraulis")
    assert [plan.max_length for plan in plans] == [variant.longest for variant in variants(PROBLEM)]
    for plan in plans:
        plan.check(num_blocks=8, world_size=8)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.predicted is not None
        assert f"the mean up to {plan.max_length}" in plan.predicted.why


def test_pipelines_that_cannot_take_the_longest_sequence_say_so() -> None:
    plan, done = variant_plan(variants(PROBLEM)[-1], PROBLEM)
    limits = [pipeline.max_length for pipeline in plan.pipelines]
    assert limits[0] is None
    assert limits[-1] == done[-1].scheme.max_length
    for packing, limit in zip(done, limits, strict=True):
        assert all(length <= (limit or 8192) for length in packing.lengths)


def test_groups_stay_in_a_node() -> None:
    cluster = PROBLEM.cluster
    for plan in make_plans(PROBLEM, "hydraulis"):
        for _, _, stage in plan.stages:
            assert len({cluster.node_of(rank) for rank in stage.devices}) == 1


def test_one_plan_is_not_taken_for_several() -> None:
    with pytest.raises(PlanError, match=r"finds a plan for each longest sequence .*\nhint: ask make_plans"):
        make_plan(PROFILE, eight(), search="hydraulis")


def test_rows_that_schemes_hold_grow_with_devices_and_memory() -> None:
    tight, ample = fitting_schemes(PROBLEM), fitting_schemes(replace(PROBLEM, cluster=eight(STATES + 2 * ROW)))
    lengths = {(s.tensor_parallel, s.stages): s.max_length for s in tight if not s.recomputes}
    assert lengths[1, 1] < lengths[2, 1] < lengths[4, 1]
    assert all(s.max_length > lengths.get((s.tensor_parallel, s.stages), 0) for s in ample if not s.recomputes)


def test_seconds_are_counted_or_as_they_are_given() -> None:
    counted = {(s.tensor_parallel, s.stages): s.times for s in fitting_schemes(PROBLEM)}
    assert counted[1, 1].a > 0
    assert counted[2, 1].seconds(8192) < counted[1, 1].seconds(8192)
    given = replace(PROFILE, times=(BlockTime("paper", 2, a=1e-9, b=1e-6, c=1e-4, bytes_per_token=100.0),))
    schemes = {(s.tensor_parallel, s.stages): s for s in fitting_schemes(replace(PROBLEM, profile=given))}
    assert {size for size, _ in schemes} == {2}
    assert (schemes[2, 2].times.a, schemes[2, 2].times.c) == (pytest.approx(4e-9), pytest.approx(4e-4))


def test_a_typical_batch_is_spread_as_the_counts_are_and_ends_with_the_longest() -> None:
    batch = typical_batch(PROFILE.sequences, 2048, 74)
    assert [batch.lengths.count(length) for length in (128, 512, 2048, 8192)] == [40, 30, 4, 0]
    assert typical_batch(PROFILE.sequences, 8192, 3).longest == 8192
    assert typical_batch({100: 1.0}, 50, 2).lengths == (50, 50)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profile": replace(PROFILE, sequences={})}, "the profile says nothing of lengths"),
        ({"profile": replace(PROFILE, other_lengths=())}, "seconds by length are not known for 'paper'\nhint: give"),
        ({"options": PlanOptions.of_program(mixes_rows=True)}, "which the program cannot be"),
    ],
)
def test_what_it_lacks_is_said_with_the_way_out(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=f"search 'hydraulis' cannot be used here: .*{message}"):
        make_plans(replace(PROBLEM, **change), "hydraulis")


def test_what_fits_nowhere_is_said() -> None:
    with pytest.raises(PlanError, match="no plan fits the memory"):
        make_plans(replace(PROBLEM, cluster=eight(1000)), "hydraulis")
