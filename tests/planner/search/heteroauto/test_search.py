import math
import random
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.heteroauto import LAYER_PARAMETERS, LAYERS, TABLE_PARAMETERS, four_kinds
from hetu_fx.cluster.cluster import Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.heteroauto.chip_cost import HeteroResult
from hetu_fx.planner.search.heteroauto.chip_problem import ChipKind, EndCosts, HeteroProblem, Layer, SearchSpace
from hetu_fx.planner.search.heteroauto.search import NEAR, OuterLevel, search
from tests.planner.search.heteroauto.examples import kind, layers_of, problem, simulated_seconds
from tests.planner.search.heteroauto.exhaustive import Exhaustive, step_seconds

COARSE = SearchSpace(split_kinds=False)
SPEEDS = st.sampled_from([1.0, 10.0, 1e9])


@st.composite
def layers(draw: st.DrawFn) -> dict[int, Layer]:
    seconds, kept, held = draw(st.floats(1, 4)), draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([0, 0.5, 1]))
    worth, again = draw(st.sampled_from([1.0, 0.8])), draw(st.sampled_from([0, 0.3]))
    degrees = draw(st.sampled_from([(1,), (2,), (1, 2)]))
    return {n: Layer(seconds / n**worth, 2 * seconds / n**worth, held / n, kept / n**0.9, again) for n in degrees}


@st.composite
def problems(draw: st.DrawFn) -> HeteroProblem:
    kinds = [
        ChipKind(
            name,
            draw(st.sampled_from([(2,), (4,), (2, 2)])),
            draw(st.sampled_from([8.0, 14.0, 20.0, 1e9])),
            draw(layers()),
            Link(draw(SPEEDS)),
            Link(draw(SPEEDS)),
            draw(st.sampled_from([0, 0.3])),
            draw(st.sampled_from([0.0, 0.7, 1.0])),
        )
        for name in "abc"[: draw(st.integers(1, 3))]
    ]
    edges = st.builds(EndCosts, st.sampled_from([0, 1.5]), st.sampled_from([0, 0.5]), st.sampled_from([0, 2]))
    return HeteroProblem(
        tuple(kinds),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 2, 4, 6])),
        Link(draw(SPEEDS), 0.2),
        draw(st.sampled_from([0, 0.5, 2])),
        draw(edges),
        draw(edges),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        zero=draw(st.sampled_from([0, 1])),
        bubble=draw(st.sampled_from([1.0, 0.5, 0.0])),
        freedom=SearchSpace(*(draw(st.booleans()) for _ in fields(SearchSpace))),
    )


def found(given_problem: HeteroProblem) -> HeteroResult | None:
    try:
        return search(given_problem)
    except PlanError:
        return None


def check(result: HeteroResult, given_problem: HeteroProblem) -> None:
    """Check that a result is a plan of its problem, and takes the seconds that it says."""
    assert sum(stage.layers for stage in result.stages) == given_problem.num_layers
    assert min(stage.layers for stage in result.stages) >= 1
    assert all(result.chips.get(kind.name, 0) <= kind.chips for kind in given_problem.kinds)
    assert given_problem.num_micro_batches % result.replicas == 0
    assert step_seconds(given_problem, result.replicas, result.stages) == pytest.approx(result.seconds, rel=1e-9)


@settings(max_examples=120)
@given(problems())
def test_with_groups_of_one_size_per_kind_it_equals_an_exhaustive_search(drawn: HeteroProblem) -> None:
    result, best = found(drawn), Exhaustive(drawn).seconds
    assert (math.inf if result is None else result.coarse_seconds) == pytest.approx(best, rel=1e-9)
    if result is not None:
        check(result, drawn)
        assert result.seconds <= result.coarse_seconds


@pytest.mark.parametrize(
    ("memory", "micro_batches", "replicas", "names"),
    [
        ((30.0, 6.0, 9.0), 4, (), {"small"}),
        ((30.0, 6.0, 9.0), 16, (1,), {"small", "middle"}),
        ((30.0, 3.0, 4.0), 16, (1,), {"large", "middle"}),
    ],
)
def test_it_equals_an_exhaustive_search_for_3_kinds_and_32_chips(
    memory: tuple[float, float, float], micro_batches: int, replicas: tuple[int, ...], names: set[str]
) -> None:
    bytes_of = {"parameter_bytes": 1.0, "kept_bytes": 1.0}
    large = kind("large", (8,), layers_of(1.0, {1: 1.0, 2: 1.8}, **bytes_of), memory[0])
    small = kind("small", (8, 8), layers_of(0.5, {2: 1.8, 4: 3.0}, **bytes_of), memory[1])
    middle = kind("middle", (4, 4), layers_of(0.8, {1: 1.0, 4: 3.0}, **bytes_of), memory[2])
    given_problem = replace(
        problem(large, small, middle, micro_batches=micro_batches),
        boundary_bytes=0.1,
        between=Link(1.0),
        replicas=replicas,
        freedom=COARSE,
    )
    exhaustive, result = Exhaustive(given_problem), search(given_problem)
    check(result, given_problem)
    assert result.seconds == pytest.approx(exhaustive.seconds, rel=1e-12)
    assert exhaustive.num_pipelines > 5_000
    assert set(result.chips) == names


def test_one_kind_alone_gets_the_uniform_plan() -> None:
    result = search(problem(kind("only", (8,), layers_of(1.0, {1: 1.0}, parameter_bytes=1.0), memory=17.0), layers=12))
    assert str(result) == "4 x only/1x6 > only/1x6"


def test_layers_follow_the_speed_of_a_kind() -> None:
    two = problem(kind("fast", (1,), layers_of(1.0)), kind("slow", (1,), layers_of(3.0)), layers=8, micro_batches=64)
    assert {s.groups.kind.name: s.layers for s in search(replace(two, replicas=(1,))).stages} == {"fast": 6, "slow": 2}


def test_the_kind_with_more_memory_stands_in_front() -> None:
    alike = layers_of(1.0, {1: 1.0}, kept_bytes=1.0)
    two = problem(kind("small", (1,), alike, memory=5.0), kind("large", (1,), alike, memory=9.0), layers=8)
    assert str(search(replace(two, replicas=(1,)))) == "1 x large/1x4 > small/1x4"
    swapped = replace(two, kinds=two.kinds[::-1])
    assert str(search(replace(swapped, replicas=(1,)))) == "1 x large/1x4 > small/1x4"


def test_only_stages_that_memory_is_too_small_for_recompute() -> None:
    small = kind("small", (2,), layers_of(1.0, {1: 1.0}, kept_bytes=1.0, input_bytes=0.1), memory=5.0)
    result = search(problem(small, layers=8, micro_batches=64))
    assert str(result) == "1 x small/1x3 again > small/1x5"


def test_a_chip_that_would_slow_the_others_down_is_left_out() -> None:
    two = problem(kind("fast", (2,), layers_of(1.0)), kind("hopeless", (2,), layers_of(99.0)), layers=4)
    assert dict(search(two).chips) == {"fast": 2}


def test_splitting_a_kind_pays_where_its_groups_of_one_size_do_not_match_the_others() -> None:
    # three chips: in groups of 1 the front has memory for a layer or two, in a group of 2 a chip is left over
    big = kind("big", (3,), layers_of(1.0, {1: 1.0, 2: 2.0}, kept_bytes=1.0, input_bytes=1.0), memory=4.0)
    odd = problem(big, layers=6, micro_batches=12)
    result = search(odd)
    check(result, odd)
    assert str(result) == "1 x big/2x4 > big/1x2"
    assert (result.seconds, result.coarse_seconds) == (11 * 6 + 12, 12 * 9)
    assert search(replace(odd, freedom=COARSE)).seconds == result.coarse_seconds


@pytest.mark.parametrize("name", [field.name for field in fields(SearchSpace)])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_switched_off_never_makes_the_step_shorter(name: str, seed: int) -> None:
    drawn = random.Random(seed)
    kinds = [
        kind(
            f"{index}",
            (4,),
            layers_of(drawn.uniform(0.5, 2.0), {1: 1.0, 2: 1.7}, kept_bytes=1.0, parameter_bytes=0.2, input_bytes=0.1),
            memory=drawn.choice([7.0, 9.0, 20.0]),
        )
        for index in range(2)
    ]
    free = replace(problem(*kinds, layers=8, micro_batches=8), boundary_bytes=1.0, between=Link(5.0), freedom=COARSE)
    less = found(replace(free, freedom=replace(COARSE, **{name: False})))
    assert search(free).seconds <= (math.inf if less is None else less.seconds)


@pytest.mark.parametrize("seed", range(12))
def test_the_step_is_within_3_percent_of_the_simulated_one_where_micro_batches_are_many(seed: int) -> None:
    drawn = random.Random(seed)
    sizes = ({1: 1.0}, {1: 1.0, 2: 1.8}, {2: 1.0, 4: 1.7})
    kinds = [
        kind(
            f"{index}",
            (drawn.choice([4, 8]),),
            layers_of(drawn.uniform(0.5, 2.0), drawn.choice(sizes), parameter_bytes=1.0, kept_bytes=0.2),
            memory=drawn.choice([60.0, 100.0]),
        )
        for index in range(drawn.randint(2, 4))
    ]
    given_problem = problem(*kinds, layers=drawn.choice([24, 48]), micro_batches=64)
    result = search(given_problem)
    count = given_problem.num_micro_batches // result.replicas
    simulated = simulated_seconds(result.stages, count)
    assert result.seconds >= simulated * (1 - 1e-9)
    many = count >= 4 * len(result.stages)
    assert result.seconds <= simulated * (1.03 if many else 1.08)


def test_1024_chips_of_4_kinds_get_a_plan_with_all_of_them() -> None:
    given_problem = four_kinds(256)
    assert 100e9 < LAYERS * LAYER_PARAMETERS + 2 * TABLE_PARAMETERS < 105e9
    result = search(given_problem)
    check(result, given_problem)
    assert dict(result.chips) == {"A": 256, "B": 256, "C": 256, "D": 256}
    assert search(replace(given_problem, kinds=given_problem.kinds[::-1])).seconds == pytest.approx(result.seconds)


def test_only_what_is_faster_than_a_limit_is_returned() -> None:
    two = problem(kind("fast", (2,), layers_of(1.0)), kind("slow", (2,), layers_of(2.0)))
    best = search(two)
    assert OuterLevel(two).search_below(best.coarse_seconds) is None
    assert OuterLevel(two).search_below(1.001 * best.coarse_seconds) == best


def test_plans_of_other_groups_that_are_nearly_as_fast_are_returned_too() -> None:
    two = problem(kind("alike", (4,), layers_of(1.0, {1: 1.0, 2: 1.99})), layers=8, micro_batches=32)
    best, *others = OuterLevel(two).near_below(math.inf)
    assert best == search(two)
    assert others
    assert all(best.seconds <= other.seconds < NEAR * best.seconds for other in others)
    assert OuterLevel(two).near_below(best.coarse_seconds) == []


def test_what_fits_nowhere_is_refused_with_the_way_out() -> None:
    small = kind("small", (2,), layers_of(1.0, kept_bytes=1.0), memory=0.2)
    with pytest.raises(PlanError, match=r"no pipeline of 6 layers fits 2 x small .*\nhint: give more chips"):
        search(problem(small, kind("other", (2,), {1: Layer(1.0, 1.0, 9.0)}, memory=2.0)))
