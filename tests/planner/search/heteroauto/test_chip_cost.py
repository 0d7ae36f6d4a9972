import random
from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.search.heteroauto.chip_cost import (
    Groups,
    HeteroStage,
    hand_over_seconds,
    held_bytes,
    transfer_seconds,
    update_seconds,
)
from hetu_fx.planner.search.heteroauto.chip_problem import EndCosts, SearchSpace
from tests.planner.search.heteroauto.examples import kind, layers_of, problem, simulated_seconds
from tests.planner.search.heteroauto.exhaustive import step_seconds

FAST, SLOW = kind("fast", (4,), layers_of(1.0)), kind("slow", (4,), layers_of(2.0))
BOTH = problem(FAST, SLOW, layers=6, micro_batches=8)


def stages(*parts: tuple[str, int, int]) -> list[HeteroStage]:
    kinds = {one.name: one for one in BOTH.kinds}
    return [HeteroStage(Groups(kinds[name], degree), layers) for name, degree, layers in parts]


def test_equal_stages_take_one_turn_per_micro_batch_and_one_per_further_stage() -> None:
    unlike = stages(("slow", 1, 2), ("fast", 1, 4))
    assert step_seconds(BOTH, 1, unlike) == pytest.approx((8 + 2 - 1) * 12)
    assert step_seconds(BOTH, 2, unlike) == pytest.approx((4 + 2 - 1) * 12)


def test_a_hidden_bubble_leaves_the_slowest_stage() -> None:
    assert step_seconds(replace(BOTH, bubble=0.0), 1, stages(("slow", 1, 2), ("fast", 2, 4))) == pytest.approx(8 * 12)


def test_what_stands_before_and_after_the_layers_counts_as_so_many_layers() -> None:
    edged = replace(BOTH, before=EndCosts(work=0.5), after=EndCosts(work=1.0))
    assert step_seconds(edged, 1, stages(("fast", 1, 3), ("fast", 1, 3))) == pytest.approx(3 * 3.5 + 3 * 4 + 7 * 3 * 4)


def test_a_stage_that_recomputes_does_its_forward_again() -> None:
    again = [replace(stage, recompute=True) for stage in stages(("fast", 1, 6))]
    assert step_seconds(BOTH, 1, again) == pytest.approx(8 * 6 * 4)
    cheap = Groups(replace(FAST, recomputed_share=0.25), 1)
    assert step_seconds(BOTH, 1, [HeteroStage(cheap, 6, recompute=True)]) == pytest.approx(8 * 6 * 3.25)


def test_a_message_to_a_larger_group_is_sliced_and_gathered_where_that_is_faster() -> None:
    link = Link(4.0)
    sending = replace(BOTH, boundary_bytes=8.0, between=link)
    two, four = Groups(replace(FAST, inside=Link(8.0)), 2), Groups(replace(SLOW, inside=Link(8.0)), 4)
    assert transfer_seconds(sending, 2, four, link) == pytest.approx(8 / 2 / 4 + 3 * 2 / 8)
    assert transfer_seconds(sending, 4, two, link) == pytest.approx(8 / 2 / 4 + 4 / 8)
    assert hand_over_seconds(sending, two, four) == pytest.approx(1.75 + 1.5)
    naive = replace(sending, freedom=SearchSpace(slice_and_gather=False))
    assert hand_over_seconds(naive, two, four) == pytest.approx(2 * 8 / 4 + 8 / 4)
    far = Groups(replace(SLOW, inside=Link(0.1)), 4)
    assert transfer_seconds(sending, 2, far, link) == pytest.approx(2 * 8 / 4)


def test_stages_of_one_kind_hand_over_on_its_own_link() -> None:
    sending = replace(BOTH, boundary_bytes=8.0, between=Link(1.0))
    one = Groups(replace(FAST, across=Link(4.0)), 1)
    assert hand_over_seconds(sending, one, one) == pytest.approx(2 * 8 / 4)
    assert hand_over_seconds(sending, one, Groups(SLOW, 1)) == pytest.approx(2 * 8)


def test_a_chip_holds_states_and_what_is_in_flight() -> None:
    small = kind("small", (1,), layers_of(1.0, {1: 1.0}, parameter_bytes=1.0, kept_bytes=3.0, input_bytes=1.0))
    keeping = HeteroStage(Groups(small, 1), 2)
    states = 2 + 2 + 2 * 2
    assert held_bytes(BOTH, 1, keeping, EndCosts(), 3) == states + 3 * 2 * 3
    assert held_bytes(BOTH, 1, replace(keeping, recompute=True), EndCosts(), 3) == states + 3 * 2 * 1 + 3
    assert held_bytes(BOTH, 1, keeping, EndCosts(parameters=1.0, kept=0.5), 3) == 12 + 3 * 2.5 * 3
    assert held_bytes(BOTH, 3, keeping, EndCosts(), 3) == 2 + 2 + 2 + 3 * 2 * 3  # zero 1: a third of 3 x 2


def test_gradients_go_around_the_replicas_and_each_updates_its_part() -> None:
    small = kind("small", (4,), layers_of(1.0, {1: 1.0}, parameter_bytes=4.0), update_seconds_per_byte=0.25)
    groups = Groups(replace(small, across=Link(2.0, 0.5)), 1)
    turn = 3 * (0.5 + 8 / 4 / 2)
    assert update_seconds(BOTH, 4, groups, 2.0, EndCosts()) == pytest.approx(2 * turn + 8 / 4 * 0.25)
    assert update_seconds(replace(BOTH, zero=0), 4, groups, 2.0, EndCosts()) == pytest.approx(2 * turn + 8 * 0.25)


def test_the_end_of_the_step_counts_where_the_slowest_stage_is() -> None:
    late = kind("late", (1,), layers_of(1.0, {1: 1.0}, parameter_bytes=1.0), update_seconds_per_byte=9.0)
    two = [HeteroStage(Groups(late, 1), 2), HeteroStage(Groups(FAST, 1), 3)]
    assert step_seconds(problem(late, FAST, layers=5, micro_batches=2), 1, two) == pytest.approx(6 + 9 + max(6 + 18, 9))


def test_a_pipeline_that_memory_does_not_hold_takes_forever() -> None:
    bound = [replace(one, memory_bytes=7.9, layers=layers_of(1.0, kept_bytes=1.0)) for one in BOTH.kinds]
    first, last = (Groups(one, 1) for one in bound)
    assert step_seconds(BOTH, 1, [HeteroStage(first, 3), HeteroStage(last, 7)]) < float("inf")
    assert step_seconds(BOTH, 1, [HeteroStage(first, 4), HeteroStage(last, 7)]) == float("inf")


@pytest.mark.parametrize("seed", range(20))
def test_the_formula_is_never_below_the_simulated_schedule(seed: int) -> None:
    drawn = random.Random(seed)
    kinds = [kind(f"{i}", (8,), layers_of(drawn.uniform(0.5, 2.0))) for i in range(drawn.randint(2, 4))]
    count = drawn.choice([1, 2, 8, 32])
    pipeline = [
        HeteroStage(Groups(one, drawn.choice([1, 2])), drawn.randint(1, 6))
        for one in kinds
        for _ in range(drawn.randint(1, 2))
    ]
    given = problem(*kinds, layers=sum(stage.layers for stage in pipeline), micro_batches=count)
    assert step_seconds(given, 1, pipeline) >= simulated_seconds(pipeline, count) * (1 - 1e-9)
