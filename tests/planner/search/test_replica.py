from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from benchmarks.cases.planning import cluster, small
from hetu_fx.planner.price.schedule_seconds import finish
from hetu_fx.planner.price.stage_seconds import StageCosts, stage_costs
from hetu_fx.planner.price.step_end import optimizer_seconds
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.search.replica import Family, Passing
from hetu_fx.planner.search.stage_estimates import ReplicaRules, stage_estimate
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Pipeline, Schedule, Stage
from tests.planner.examples import paper, parted, transformer

COSTS = transformer(layers=4, units=4)
CLUSTER = paper(100, 100, 50)
MEMORY = {0: 7000, 1: 5000, 2: 6000}


def test_of_devices_with_equal_shares_the_one_with_least_memory_stands_for_all() -> None:
    even = stage_estimate(Stage((0, 1)), 1, 3, COSTS, CLUSTER, MEMORY)
    assert [(room, piece.share) for room, piece in even.holdings] == [(5000, 0.5)]
    uneven = stage_estimate(Stage((0, 1, 2), (2, 1, 1)), 1, 3, COSTS, CLUSTER, MEMORY)
    assert [(room, piece.share) for room, piece in uneven.holdings] == [(7000, 0.5), (5000, 0.25)]


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
    first, second, third = (2 / 3 * line(2) for line in made.passing.work)
    second, third = second + made.passing.edges[0](2), third + made.passing.edges[1](2)
    for gradients in (0.1 * first, first + second, 10 * third):
        held = [stage.parameter_bytes for stage in made.stages]
        left = zip(
            (held[0] / max(held), held[1] / max(held), 1.0),
            (first, first + second, first + second + third),
            strict=True,
        )
        shown = max(gradients * share - passed for share, passed in left)
        assert max(line(2) for line in made.shown(gradients)) == pytest.approx(shown)
    even = replace(made, stages=tuple(replace(stage, parameter_bytes=1.0) for stage in made.stages))
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
    crowded = made.with_crowds((4, 1))
    sent = 3 * made.passing.edges[0].slope * 2
    assert crowded.latency(8, 4) - made.latency(8, 4) == pytest.approx(2 * sent)
    assert crowded.seconds(8, 4) > made.seconds(8, 4)
    assert made.with_crowds((1, 1)) is made


def played(work: list[Line], edges: list[Line], rows: int, count: int, schedule: Schedule) -> float:
    """Return the seconds of a schedule that is played, of stages that hand over beside their work."""
    nothing, around = Line(), [*edges, Line()]
    stages = [
        StageCosts(
            Stage((0,)), (PartCosts(),), (), (0.0,), (own,), nothing, nothing, there, back, (nothing,), (nothing,)
        )
        for own, there, back in zip(work, around, [Line(), *edges], strict=True)
    ]
    return finish(stages, rows, count, schedule, beside=(1,) * len(edges)).seconds


def drawn(seed: int) -> tuple[list[Line], list[Line], int]:
    """Draw stages of like work, what they hand over, and how many micro-batches there are: not fewer than stages."""
    rng = random.Random(seed)
    work = [Line(0.0, 3.0 * rng.uniform(0.8, 1.0)) for _ in range(rng.randint(1, 12))]
    edges = [Line(0.0, rng.choice((0.01, 0.5, 1.0)) * rng.uniform(0.5, 1.0)) for _ in work[1:]]
    return work, edges, rng.randint(len(work), 64)


def test_micro_batches_take_about_as_long_as_in_a_schedule_that_is_played() -> None:
    for seed in range(200):
        work, edges, count = drawn(seed)
        found = Passing.of(work, edges, "1f1b").seconds(count, count)
        assert found == pytest.approx(played(work, edges, count, count, "1f1b"), rel=0.07)


def test_hand_overs_slow_pipelines_that_take_turns_alone() -> None:
    work, edges = [Line(0.0, 3.0)] * 8, [Line(0.0, 2.0)] * 7
    whole = 8 * 3.0 + 2 * 7 * 2.0
    assert Passing.of(work, edges, "1f1b").seconds(64, 64) == pytest.approx(whole + 63 * whole / 8)
    assert Passing.of(work, edges, "1f1b").seconds(4, 4) == pytest.approx(whole + 3 * (9.0 + 8.0) / 3)
    assert Passing.of(work, edges, "gpipe").seconds(64, 64) == pytest.approx(whole + 63 * 3.0)


def test_lines_that_are_nowhere_above_others_change_nothing() -> None:
    for seed in range(100):
        work, edges, count = drawn(seed)
        made, stages = Passing.of(work, edges, "1f1b"), len(work)
        own, sent = ([line.slope for line in lines] for lines in (work, edges))
        turns = [sum(own[s:]) + 2 * sum(sent[s:]) for s in range(stages)]
        beats = [turn / (stages - s) for s, turn in enumerate(turns) if stages - s < count]
        pairs = [(a + b + 2 * c) / 2 for (a, b), c in zip(itertools.pairwise(own), sent, strict=True)]
        beat = max([*own, *beats, *(pairs if count > 2 else [])])
        assert made.seconds(count, count) == pytest.approx(turns[0] + (count - 1) * beat)


def test_nothing_takes_no_time() -> None:
    assert Passing.of([Line(1.0, 1.0)], [], "1f1b").seconds(0, 4) == 0.0


def test_what_is_handed_over_is_charged_to_both_ends_and_counts_in_the_last_backward() -> None:
    work, edges = [Line(0.0, 3.0), Line(0.0, 6.0)], [Line(0.0, 0.5)]
    passing = Passing.of(work, edges, "1f1b")
    assert [line(1) for line in passing.charged] == [3.5, 6.5]
    found = [line(1) for line in passing.backwards]
    assert found == pytest.approx(list(itertools.accumulate([2.0, 0.5 + 4.0])))
