from dataclasses import replace

import pytest

from benchmarks.cases.planning import cluster, small
from hetu_fx.planner.price.stage import stage_costs
from hetu_fx.planner.price.step_end import optimizer_seconds
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.search.replica import Family
from hetu_fx.planner.search.stage_estimates import ReplicaRules, stage_estimate
from hetu_fx.plans.plan import Pipeline, Stage
from tests.planner.examples import paper, parted, transformer

COSTS = transformer(layers=4, units=4)
CLUSTER = paper(100, 100, 50)
MEMORY = {0: 7000, 1: 5000, 2: 6000}


def test_of_devices_with_equal_shares_the_one_with_least_memory_stands_for_all() -> None:
    even = stage_estimate(Stage((0, 1)), 1, 3, COSTS, CLUSTER, MEMORY)
    assert [(held.memory, held.piece.share) for held in even.holdings] == [(5000, 0.5)]
    uneven = stage_estimate(Stage((0, 1, 2), (2, 1, 1)), 1, 3, COSTS, CLUSTER, MEMORY)
    assert [(held.memory, held.piece.share) for held in uneven.holdings] == [(7000, 0.5), (5000, 0.25)]


def test_seconds_are_those_of_the_cost_model_without_hand_overs() -> None:
    stage = Stage((0, 2), (3, 1), 4)
    found = stage_estimate(stage, 0, 4, COSTS, CLUSTER, MEMORY)
    (priced,) = stage_costs(parted(Pipeline((stage,)), COSTS), COSTS, CLUSTER)
    assert found.seconds(3) == pytest.approx(priced.seconds(3), rel=1e-12)
    shares = zip((0, 2), (0.75, 0.25), strict=True)
    whole = COSTS.stage(0, 4)
    updates = [optimizer_seconds(whole.parameter_bytes_at(share), CLUSTER.device(rank)) for rank, share in shares]
    assert found.update_seconds == max(updates)


def test_gradients_that_travel_for_long_are_hidden_by_fewer_micro_batches() -> None:
    costs, rules = small(64).costs, ReplicaRules("1f1b", 1, (1, 2, 4, 8), dict.fromkeys(range(2), 1 << 50))
    replica = Estimates(costs, cluster({"A100-80G": 2}), rules).replica(((0,), (1,)), (16, 16))
    ways = {count: replica.seconds(8, count) for count in rules.micro_batches}
    chosen = []
    for gradients in (0.0, 0.5 * ways[8], 2 * ways[8]):
        best = Family(replica, 2, rules).hiding(gradients, 1).best(8)
        assert best is not None
        late = replica.shown(gradients)
        shown = {n: max(0.0, *(line(8 // n) for line in late)) for n in ways}
        assert best.seconds + shown[best.micro_batches] == min(ways[n] + shown[n] for n in ways)
        chosen.append(best.micro_batches)
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


def test_gradients_of_later_stages_travel_beside_the_backward_of_earlier_ones() -> None:
    costs, rules = small(64).costs, ReplicaRules("1f1b", 1, (4,), dict.fromkeys(range(3), 1 << 50))
    made = Estimates(costs, cluster({"A100-80G": 3}), rules).replica(((0,), (1,), (2,)), (8, 12, 12))
    first, second, third = (2 / 3 * line(2) for line in made.work)
    second, third = second + made.edges[0](2), third + made.edges[1](2)
    for gradients in (0.1 * first, first + second, 10 * third):
        shares = (made.stage_bytes[0] / max(made.stage_bytes), made.stage_bytes[1] / max(made.stage_bytes), 1.0)
        left = zip(shares, (first, first + second, first + second + third), strict=True)
        shown = max(gradients * share - passed for share, passed in left)
        assert max(line(2) for line in made.shown(gradients)) == pytest.approx(shown)
    even = replace(made, stage_bytes=(1.0, 1.0, 1.0))
    assert max(line(2) for line in even.shown(10.0)) == pytest.approx(
        10 - first
    )  # what the first stage holds leaves last
    assert [made.left(block)(2) for block in (8, 20, 32)] == pytest.approx(
        [first, first + second, first + second + third]
    )
    assert made.left(14)(2) == pytest.approx(first + second / 2)


def test_a_replica_beside_others_hands_over_on_links_that_it_shares() -> None:
    costs, rules = small(64).costs, ReplicaRules("1f1b", 1, (4,), dict.fromkeys(range(3), 1 << 50))
    made = Estimates(costs, cluster({"A100-80G": 3}, per_node=1), rules).replica(((0,), (1,), (2,)), (8, 12, 12))
    crowded = made.crowded((4, 1))
    sent = 3 * made.edges[0].slope * 2
    assert crowded.latency(8, 4) - made.latency(8, 4) == pytest.approx(2 * sent)
    assert crowded.seconds(8, 4) > made.seconds(8, 4)
    assert made.crowded((1, 1)) is made
