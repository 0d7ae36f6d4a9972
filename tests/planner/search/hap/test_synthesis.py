import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap import synthesis
from hetu_fx.planner.search.hap.op_forms import SynthesisRules
from hetu_fx.planner.search.hap.search import program_bytes
from hetu_fx.planner.search.hap.synthesised_program import synthesise
from hetu_fx.planner.search.hap.tensor_states import Limits
from tests.planner.search.hap.exhaustive import fastest, programs
from tests.planner.search.hap.small import chain, drawn, expansion, feed_forward

SEEDS = st.integers(0, 10_000)
SHARES = st.sampled_from([(0.75, 0.25), (0.5, 0.5), (0.9, 0.1), (0.65, 0.35)])
OPS = st.integers(1, 4)
SLOW = (3e5, 1e5)  # work matters more than exchanges


@settings(max_examples=25)
@given(SEEDS, OPS, SHARES, SHARES)
def test_the_first_end_is_the_fastest_of_all_programs(
    seed: int, num_ops: int, shares: tuple[float, float], others: tuple[float, float]
) -> None:
    problem = drawn(seed, num_ops)
    given = expansion(problem, ratios=(shares, others)[: problem.num_segments])
    prices = given.prices
    found = synthesise(given).program.seconds(prices.speeds, prices.ratios)
    assert found == pytest.approx(fastest(given), rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_so_it_is_after_six_ops(seed: int) -> None:
    given = expansion(chain(seed), ratios=((0.65, 0.35),))
    found = synthesise(given)
    assert found.is_exact
    assert found.program.seconds(given.prices.speeds, given.prices.ratios) == pytest.approx(fastest(given), rel=1e-9)


@settings(max_examples=15)
@given(SEEDS, st.integers(1, 3), SHARES, st.floats(0.2, 1.0))
def test_with_limits_of_memory_it_is_the_fastest_of_those_that_fit(
    seed: int, num_ops: int, shares: tuple[float, float], tightness: float
) -> None:
    problem = drawn(seed, num_ops)
    ample = expansion(problem, ratios=(shares,) * problem.num_segments)
    worst = max(held.copied + sum(held.spread) for _, held in programs(ample))
    limits = Limits(worst * tightness, worst * tightness * 1.4, 2)
    given = expansion(problem, ratios=ample.prices.ratios, limits=limits)
    best = fastest(given)
    if math.isinf(best):
        with pytest.raises(PlanError, match="no program fits the memory of 2 devices"):
            synthesise(given)
        return
    found = synthesise(given)
    assert found.is_exact
    assert found.program.seconds(given.prices.speeds, given.prices.ratios) == pytest.approx(best, rel=1e-9)
    held = program_bytes(found.program, problem)
    assert held.copied <= limits.least * (1 + 1e-9)


@settings(max_examples=15)
@given(SEEDS, OPS, SHARES)
def test_no_bound_is_above_the_seconds_of_any_program(seed: int, num_ops: int, shares: tuple[float, float]) -> None:
    problem = drawn(seed, num_ops)
    given = expansion(problem, ratios=(shares,) * problem.num_segments)
    bound = max(math.fsum(column) for column in zip(*given.least_work, strict=True))
    assert bound <= fastest(given) * (1 + 1e-9)


@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize("shares", [(0.75, 0.25), (0.55, 0.45)])
def test_blocks_searched_once_give_what_all_blocks_give(layers: int, shares: tuple[float, float]) -> None:
    problem = feed_forward(layers=layers)
    given, op_by_op = (expansion(one, ratios=(shares,)) for one in (problem, replace(problem, blocks=())))
    once, all_of_them = synthesise(given), synthesise(op_by_op)
    seconds = [found.program.seconds(given.prices.speeds, (shares,)) for found in (once, all_of_them)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12)
    assert [step.op.name for step in once.program.steps] == [op.name for op in given.problem.ops]


def test_a_search_of_equal_blocks_grows_little_with_their_number() -> None:
    few, many = (synthesise(expansion(feed_forward(layers=n))).num_states for n in (2, 40))
    assert many < few + 40 * 6


def test_a_feed_forward_block_takes_one_all_reduce_each_way_where_weights_are_large() -> None:
    given = expansion(feed_forward(rows=16, width=64, inner=512, layers=2), SLOW)
    program = synthesise(given).program
    exchanged = [(t.change, t.is_backward) for step in program.steps[3:6] for t in step.transfers]
    assert [str(step.form) for step in program.steps[3:6]] == ["cut on o", "cut on o", "cut on k"]
    assert exchanged == [("all-reduce", False), ("all-reduce", True)]


def test_copies_whose_gradients_are_not_tracked_cost_an_all_reduce_more() -> None:
    problem = feed_forward(rows=16, width=64, inner=512)
    end = replace(problem.ops[-1], whole=frozenset("bo"), linear=())  # needs all, so that all devices do it
    problem = replace(problem, ops=(*problem.ops[:-1], end))
    exchanged = []
    for rules in (SynthesisRules(), SynthesisRules(tracks_gradients=False)):
        program = synthesise(expansion(problem, SLOW, rules=rules)).program
        exchanged.append([(str(t.change), t.is_backward) for t in program.transfers])
    assert exchanged == [[("all-reduce", False)], [("all-reduce", False), ("all-reduce", True)]]


def test_an_op_that_nothing_allows_is_refused_with_its_name() -> None:
    problem = feed_forward()
    stuck = replace(problem.ops[1], copyable=False, whole=frozenset("bo"))
    problem = replace(problem, ops=(problem.ops[0], stuck, *problem.ops[2:]), blocks=())
    with pytest.raises(PlanError, match=r"ops \['0\.gelu'\] can be done in no form by 2 devices"):
        synthesise(expansion(problem))


def test_a_search_that_leaves_states_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given = expansion(replace(feed_forward(rows=16, width=64, inner=512, layers=2), blocks=()), SLOW)
    whole = synthesise(given)
    monkeypatch.setattr(synthesis, "MOST_STATES", 1)
    monkeypatch.setattr(synthesis, "FEWEST_STATES", 1)
    part = synthesise(given)
    seconds = [found.program.seconds(SLOW, given.prices.ratios) for found in (whole, part)]
    assert (whole.is_exact, part.is_exact) == (True, False)
    assert seconds[0] <= seconds[1]
