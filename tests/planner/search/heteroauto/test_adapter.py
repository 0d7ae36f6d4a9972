from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plan, make_plans
from hetu_fx.planner.price.step import memory_problems
from hetu_fx.planner.search.cluster_regions import MOST_CLASSES
from hetu_fx.planner.search.device_orders import devices_by_likeness
from hetu_fx.planner.search.heteroauto.adapter import HeteroProblems, placed_groups, shapes
from hetu_fx.planner.search.heteroauto.search import search
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import BlockTime, Profile, Slowdown
from hetu_fx.planner.values.program import ProgramCosts
from tests.planner.examples import FAST_LINK, paper, transformer

MODEL = Profile(transformer(layers=12, rows=64, length=512, width=512, units=4), tokens_per_row=512)
STATES, ROW = int(4 * MODEL.costs.whole.parameter_bytes), int(MODEL.costs.whole.activation_bytes)
SLOW_LINK = Link(1e8, 1e-4)


def two_kinds(memory_bytes: tuple[int, int] = (1 << 40, 1 << 40)) -> Cluster:
    """Return four devices of each of two kinds, the second a third as fast, on a node each."""
    return Cluster.on_paper(
        [3e12] * 4 + [1e12] * 4,
        memory_bytes=[memory_bytes[0]] * 4 + [memory_bytes[1]] * 4,
        nodes="aaaabbbb",
        kinds=["fast"] * 4 + ["slow"] * 4,
        intra=FAST_LINK,
        inter=SLOW_LINK,
    )


BOTH = Problem(MODEL, two_kinds())


def test_the_plan_is_one_of_ours_priced_by_the_cost_of_all_searches() -> None:
    plan = make_plan(MODEL, BOTH.cluster, search="heteroauto")
    plan.check(num_blocks=12, world_size=8)
    assert plan.predicted is not None
    assert plan.predicted.seconds == expect(plan, MODEL.costs, BOTH.cluster).seconds


def test_a_stage_stands_on_one_kind_and_slower_kinds_hold_fewer_blocks() -> None:
    result = search(HeteroProblems(BOTH).of(replicas=2, micro_batches=8))
    layers = {"fast#0": 0, "slow#4": 0}
    for stage in result.stages:
        layers[stage.groups.kind.name] += stage.layers
    assert 2 * layers["slow#4"] < layers["fast#0"]
    assert sum(layers.values()) == 12


def test_replicas_stand_side_by_side_or_one_after_the_other() -> None:
    result = search(HeteroProblems(BOTH).of(replicas=2, micro_batches=8))
    beside, apart = (placed_groups(BOTH.cluster, result, by_replica) for by_replica in (False, True))
    assert beside.keys() == apart.keys()
    assert set().union(*beside.values()) == set().union(*apart.values())
    assert beside[0, 0] == apart[0, 0]
    for (stage, _), ranks in beside.items():
        assert {f"{BOTH.cluster.device(rank).kind}" for rank in ranks} == {
            result.stages[stage].groups.kind.name.split("#")[0]
        }


def test_kinds_in_unlike_numbers_each_have_replicas_of_their_own() -> None:
    narrow = transformer(layers=2, rows=64, length=512, width=512, units=1)
    cluster = Cluster.on_paper([3e12] * 6 + [1e12] * 3, nodes="aaaaaabbb", kinds=["fast"] * 6 + ["slow"] * 3)
    plan = make_plan(narrow, cluster, search="heteroauto")
    assert len(plan.pipelines) == len(plan.devices) == 9  # more replicas than any kind of chips has
    shares = [pipeline.share for pipeline in plan.pipelines]
    assert min(shares[:6]) > 2 * max(shares[6:])


def test_plans_keep_within_memory_and_use_both_kinds_where_one_is_too_small() -> None:
    cluster = two_kinds(((STATES + 3 * ROW) // 8, (STATES + 3 * ROW) // 3))
    plan = make_plan(MODEL, cluster, search="heteroauto")
    assert plan.predicted is not None
    assert not memory_problems(plan.predicted, cluster, 0.9)
    assert {cluster.device(rank).kind for rank in plan.devices} == {"fast", "slow"}


def test_what_fits_nowhere_is_said() -> None:
    with pytest.raises(PlanError, match="no plan fits the memory"):
        make_plan(MODEL, two_kinds((1000, 1000)), search="heteroauto")


def test_devices_are_of_one_kind_if_they_differ_in_nothing_but_their_nodes() -> None:
    cluster = two_kinds().with_rates({1: 2.0, 6: 1.5})
    assert [[d.rank for d in alike.devices] for alike in devices_by_likeness(cluster)] == [
        [0, 2, 3],
        [1],
        [4, 5, 7],
        [6],
    ]
    made = HeteroProblems(replace(BOTH, cluster=cluster)).of(1, 8)
    fast, slowed = made.kinds[0].layers[1], made.kinds[1].layers[1]
    assert slowed.forward_seconds == pytest.approx(2 * fast.forward_seconds)
    assert [kind.nodes for kind in made.kinds] == [(3,), (1,), (3,), (1,)]
    assert made.kinds[0].degrees == (1, 2)


def test_devices_of_like_memory_are_of_one_kind_with_the_least_of_it() -> None:
    free = [1 << 30, (1 << 30) + (1 << 20), 1 << 32, 1 << 30]
    cluster = Cluster.on_paper([1e12] * 4, memory_bytes=free, intra=FAST_LINK)
    assert [[d.rank for d in alike.devices] for alike in devices_by_likeness(cluster)] == [[0, 1, 3], [2]]
    assert [alike.memory_bytes for alike in devices_by_likeness(cluster)] == [1 << 30, 1 << 32]


def test_links_inside_a_node_are_used_by_what_stands_on_one() -> None:
    made = HeteroProblems(BOTH).of(1, 8)
    assert made.between == SLOW_LINK
    assert {kind.across for kind in made.kinds} == {FAST_LINK}
    assert HeteroProblems(Problem(MODEL, paper(2, 1))).of(1, 8).between == FAST_LINK


def test_times_count_only_where_every_kind_has_some_and_alpha_never() -> None:
    def seconds(profile: Profile) -> list[float]:
        made = HeteroProblems(replace(BOTH, profile=profile)).of(1, 16)
        return [kind.layers[1].forward_seconds + kind.layers[1].backward_seconds for kind in made.kinds]

    counted = seconds(MODEL)
    alpha = tuple(Slowdown(kind, {2: 1.0, 1: 1.8}) for kind in ("fast", "slow"))
    assert seconds(replace(MODEL, alpha=alpha)) == counted
    fast, slow = (BlockTime(kind, 1, a=0.0, b=per_token) for kind, per_token in (("fast", 1e-6), ("slow", 4e-6)))
    assert seconds(replace(MODEL, times=(fast,))) == counted
    assert seconds(replace(MODEL, times=(fast, slow))) == pytest.approx([4 * 512 * 1e-6, 4 * 512 * 4e-6])


def test_what_stands_before_and_after_the_blocks_counts_in_blocks() -> None:
    made = HeteroProblems(BOTH).of(1, 8)
    block, after = MODEL.costs.blocks[0], MODEL.costs.after
    assert made.after.parameters == pytest.approx(after.parameter_bytes / block.parameter_bytes)
    assert made.after.kept == pytest.approx(after.activation_bytes / block.activation_bytes)
    assert 0 < made.before.work < made.after.work


def test_replicas_are_as_many_as_groups_of_a_kind_make_pipelines() -> None:
    few = replace(BOTH, options=PlanOptions(micro_batches=(1, 4)))
    assert {count for _, count in shapes(few)} == {1, 4}
    assert {replicas for replicas, _ in shapes(few)} == {1, 2, 4}
    many = replace(few, cluster=Cluster.on_paper([2e12] * 24 + [1e12] * 15, kinds=["fast"] * 24 + ["slow"] * 15))
    assert {3, 5, 6, 12, 15, 24} <= {replicas for replicas, _ in shapes(many)}
    assert all(replicas * count <= 64 for replicas, count in shapes(many))


def test_groups_of_four_kinds_stay_inside_their_nodes() -> None:
    speeds = [s for s in (4.0, 3.0, 2.0, 1.0) for _ in range(4)]
    cluster = paper(*[1000 * s for s in speeds], nodes="aaaabbccddddeeff", inter=SLOW_LINK)
    plan = make_plan(MODEL, cluster, options=PlanOptions(micro_batches=(8,)), search="heteroauto")
    assert plan.predicted is not None
    for *_, stage in plan.stages:
        assert len({cluster.node_of(rank) for rank in stage.devices}) == 1


def test_a_program_or_cluster_that_it_is_not_for_is_refused() -> None:
    bare = Profile(ProgramCosts(8, PartCosts(flops=1e9), (), PartCosts()))
    with pytest.raises(PlanError, match="'heteroauto' cannot be used here: it places repeated blocks"):
        make_plan(bare, paper(1, 2), search="heteroauto")
    whole = PlanOptions.of_program(mixes_rows=True)
    with pytest.raises(PlanError, match="it makes pipelines, which the program cannot be cut into"):
        make_plan(MODEL, paper(1, 2), options=whole, search="heteroauto")
    unlike = paper(*range(1, MOST_CLASSES + 2))
    with pytest.raises(
        PlanError, match=f"up to {MOST_CLASSES} kinds .* these are of {MOST_CLASSES + 1} .*\nhint: use .*'malleus'"
    ):
        make_plan(MODEL, unlike, search="heteroauto")


def test_a_long_search_tells_how_far_it_is_and_answers_the_same() -> None:
    told: list[tuple[object, ...]] = []
    assert make_plans(replace(BOTH, tell=lambda *now: told.append(now)), "heteroauto") == make_plans(BOTH, "heteroauto")
    assert told[0] == ("heteroauto: regions", 0, 3)
