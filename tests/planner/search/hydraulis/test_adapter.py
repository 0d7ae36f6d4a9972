from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plan, make_plans
from hetu_fx.planner.search.hydraulis.adapter import typical_batch, variant_plan, variants
from hetu_fx.planner.search.hydraulis.schemes import fitting_schemes
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.profile_file import BlockTime, Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from tests.planner.examples import paper, transformer


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
