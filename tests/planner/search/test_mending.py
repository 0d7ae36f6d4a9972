import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.search.mending import Mending, lacking
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=12, rows=32, length=512, width=512)
PLAN = Plan(
    (
        Pipeline((Stage((0, 1, 2, 3), blocks=6), Stage((4, 5, 6, 7), blocks=6)), micro_batches=8),
        Pipeline((Stage((8, 9, 10, 11), blocks=6), Stage((12, 13, 14, 15), blocks=6)), micro_batches=8),
    )
)
WIDE = transformer(layers=16, rows=32, length=512, width=1024, units=8)


def problem(rates: dict[int, float]) -> Problem:
    return Problem(Profile(COSTS), paper(*[1000] * 16, nodes="aaaaaaaabbbbbbbb").with_rates(rates))


def test_without_stragglers_the_groups_stay() -> None:
    adapted = Mending(problem({})).adapt_plan(PLAN)
    assert adapted is not None
    assert [stage.devices for *_, stage in adapted.plan(problem({})).stages] == [
        stage.devices for *_, stage in PLAN.stages
    ]


def test_a_stragglers_pipeline_is_mended_and_the_other_stays() -> None:
    slowed = problem({5: 6.0})
    adapted = Mending(slowed).adapt_plan(PLAN)
    assert adapted is not None
    plan = adapted.plan(slowed)
    hurt, other = plan.pipelines
    assert [stage.devices for stage in other.stages] == [(8, 9, 10, 11), (12, 13, 14, 15)]
    assert hurt.share <= other.share
    assert (4, 5, 6, 7) not in [stage.devices for stage in hurt.stages]
    now = expect(plan, COSTS, slowed.cluster).seconds
    assert abs(now / adapted.seconds - 1) < 0.1
    assert now < 0.7 * expect(PLAN, COSTS, slowed.cluster).seconds


def test_a_hopeless_straggler_is_left_out() -> None:
    hopeless = problem({5: 1000.0})
    adapted = Mending(hopeless).adapt_plan(PLAN)
    assert adapted is not None
    assert 5 not in adapted.plan(hopeless).devices


def test_a_pipeline_goes_on_without_devices_that_are_lost() -> None:
    left = Problem(Profile(COSTS), paper(*[1000] * 15, nodes="aaaaaaaabbbbbbb"))
    adapted = Mending(left, lost=[15]).adapt_plan(PLAN)
    assert adapted is not None
    other, hurt = adapted.plan(left).pipelines
    assert [stage.devices for stage in other.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {stage.devices for stage in hurt.stages} == {(8, 9, 10, 11), (12, 13), (14,)}
    assert hurt.share <= other.share


def test_a_pipeline_that_is_lost_is_left_out() -> None:
    left = Problem(Profile(COSTS), paper(*[1000] * 8, nodes="aaaaaaaa"))
    adapted = Mending(left, lost=range(8, 16)).adapt_plan(PLAN)
    assert adapted is not None
    assert [stage.devices for *_, stage in adapted.plan(left).stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def of(nodes: str, *speeds: float, memory_bytes: int = 1 << 40) -> Cluster:
    return paper(*(speeds or [1000] * len(nodes)), nodes=nodes, inter=Link(1e9, 1e-5), memory_bytes=memory_bytes)


def test_nodes_lack_what_the_largest_of_their_kind_has_more() -> None:
    added = lacking(of("aaaabbbbccc"))
    assert [(device.rank, device.node) for device in added] == [(11, "c")]
    assert not lacking(of("aaaabbbb"))
    assert not lacking(of("aaaabbbb", *[1000] * 4, *[300] * 4))


def test_nodes_that_lack_much_are_not_taken_for_full() -> None:
    assert not lacking(of("aaaaaaaab"))


def test_all_devices_work_where_a_node_has_lost_one() -> None:
    memory_bytes = int(1.2 * WIDE.whole.parameter_bytes)  # eight devices hold a model with its states, not four
    cluster, options = of("aaaabbbbccccddd", memory_bytes=memory_bytes), PlanOptions(zero=0)
    mended = make_plan(WIDE, cluster, search="ragged", options=options)
    even = make_plan(WIDE, cluster, search="homogeneous", options=options)
    assert mended.predicted is not None
    assert even.predicted is not None
    assert len(mended.devices) == 15
    assert mended.predicted.seconds < even.predicted.seconds
    assert make_plan(WIDE, cluster, options=options).predicted == mended.predicted


def test_full_nodes_are_refused() -> None:
    with pytest.raises(PlanError, match="all nodes of a kind have as many devices"):
        make_plan(WIDE, of("aaaabbbb"), search="ragged")
