from dataclasses import replace
from functools import partial

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.make_plan import make_plan, make_plans
from hetu_fx.planner.search.homogeneous import HOMOGENEOUS
from hetu_fx.planner.search.hydraulis.adapter import HYDRAULIS
from hetu_fx.planner.search.malleus.adapter import MALLEUS
from hetu_fx.planner.search.problem import Problem, Search
from hetu_fx.planner.searches import AUTO, SearchRule, always, auto, some_straggle
from hetu_fx.planner.values.options import PlanOptions, TimeLimit
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from tests.planner.examples import paper, transformer

MODEL = Profile(transformer(layers=16, rows=64, length=512, width=512))
NODES = "aaaabbbbccccdddd"
SLOW = Link(1e9, 1e-5)
CONVOLUTIONS = Profile(
    ProgramCosts(64, PartCosts(flops=4e9, activation_bytes=1e7, parameter_bytes=1e8, num_ops=160), (), PartCosts()),
    mixes_rows=True,
)


def of(*speeds: float) -> Cluster:
    return paper(*speeds, nodes=NODES[: len(speeds)], inter=SLOW)


@pytest.mark.parametrize("model", [MODEL, CONVOLUTIONS], ids=["transformer", "convolutions"])
@pytest.mark.parametrize(
    "cluster",
    [of(*[1000] * 16), of(*[1000] * 8, *[400] * 8), of(*[1000] * 16).with_rates({0: 2.6, 5: 5.0}), of(4, 4, 2, 2)],
    ids=["equal", "two kinds", "stragglers", "few"],
)
def test_it_is_never_worse_than_the_best_homogeneous_plan(model: Profile, cluster: Cluster) -> None:
    problem = Problem(model, cluster, PlanOptions.of_program(mixes_rows=model.mixes_rows))
    (best,) = make_plans(problem, "auto")
    assert best.predicted is not None
    # of plans that differ by less than the predictions are exact, the simplest is taken
    assert best.predicted.seconds <= min(HOMOGENEOUS.find(problem).values()) * 1.01


def test_unlike_devices_get_unlike_work() -> None:
    plan = make_plan(MODEL, of(*[1000] * 8, *[400] * 8), search="auto")
    even = make_plan(MODEL, of(*[1000] * 8, *[400] * 8), search="homogeneous")
    assert plan.predicted is not None
    assert even.predicted is not None
    assert plan.predicted.seconds < 0.86 * even.predicted.seconds


def test_searches_that_suit_or_lack_nothing_are_asked() -> None:
    problem = Problem(MODEL, of(4, 4, 2, 2))
    alone = HOMOGENEOUS.find(problem)
    never, lacking = (
        SearchRule(MALLEUS, lambda problem: False),
        SearchRule(replace(MALLEUS, lacks=lambda problem: "all"), always),
    )
    assert auto(HYDRAULIS, [SearchRule(HOMOGENEOUS, always), never, lacking]).find(problem) == alone
    asked = auto(HYDRAULIS, [SearchRule(HOMOGENEOUS, always), SearchRule(MALLEUS, always)]).find(problem)
    assert asked == {**alone, **MALLEUS.find(problem)}


def test_where_time_is_over_early_the_homogeneous_search_has_been_asked() -> None:
    cluster = of(*[1000] * 4, *[10] * 8)
    kinds = tuple(replace(device, kind="slow" if device.speed < 1e11 else "quick") for device in cluster.devices)
    problem = Problem(MODEL, replace(cluster, devices=kinds), PlanOptions(seconds=1.0))

    def found(search: Search) -> set[Plan]:
        over = TimeLimit(0.0, lambda: 1.0)  # the clock stands: whatever is asked once something is known finds it over
        return set(search.find(replace(problem, time_limit=over)))

    assert found(HOMOGENEOUS)
    assert found(AUTO) == found(HOMOGENEOUS)


def test_in_large_clusters_a_search_for_stragglers_needs_some() -> None:
    suits = partial(some_straggle, or_up_to=4)
    few, many = (Problem(MODEL, of(*[4] * half, *[2] * half)) for half in (2, 4))
    assert suits(few)
    assert not suits(many)
    assert suits(replace(many, cluster=many.cluster.with_rates({0: 2.0})))
    assert not suits(Problem(MODEL, of(4, 4)))


def test_where_lengths_differ_there_is_a_plan_for_each_longest_sequence() -> None:
    def model(length: int) -> ProgramCosts:
        return transformer(layers=8, rows=32, length=length, width=256, units=8)

    others = ((256, model(256)), (8192, model(8192)))
    profile = Profile(model(1024), 1024, other_lengths=others, sequences={128: 40.0, 512: 30.0, 8192: 1.0})
    needed = 4 * profile.costs.whole.parameter_bytes + 0.7 * model(8192).whole.activation_bytes
    problem = Problem(profile, paper(*[1000] * 8, nodes="aaaabbbb", memory_bytes=int(needed)))
    plans = make_plans(problem, "auto")
    assert plans == make_plans(problem, "hydraulis")
    assert plans[-1].max_length == 8192
