from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.op_forms import SynthesisRules
from hetu_fx.planner.search.hap.prices import Collectives
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.tensor_program import Tensor, TensorProgram
from tests.oracles.hap_programs import layouts, rounded_seconds
from tests.planner.search.hap.small import LINES, drawn, feed_forward

UNEQUAL = Cluster.on_paper([3e5, 1e5])


def in_segments(problem: TensorProgram) -> TensorProgram:
    """Return the problem with its later half in a segment of its own."""
    half = len(problem.ops) // 2
    ops = tuple(replace(op, segment=int(i >= half)) for i, op in enumerate(problem.ops))
    return replace(problem, ops=ops, blocks=())


@settings(max_examples=10)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_the_best_pair_of_all_rounds_is_returned(seed: int, num_ops: int) -> None:
    result = search(drawn(seed, num_ops), UNEQUAL, collectives=LINES)
    assert result.seconds == pytest.approx(result.program.seconds(result.speeds, result.ratios), rel=1e-12)
    assert result.seconds <= min(seconds for pair in result.rounds for seconds in pair) * (1 + 1e-6)
    assert result.is_exact


@settings(max_examples=10)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_segments_of_their_own_ratios_are_never_slower(seed: int, num_ops: int) -> None:
    problem = drawn(3 * seed + 1, num_ops)
    one = search(problem, UNEQUAL, collectives=LINES)
    several = search(in_segments(problem), UNEQUAL, collectives=LINES)
    assert several.seconds <= one.seconds * (1 + 1e-6)


def test_a_part_that_exchanges_much_gets_even_ratios_and_the_rest_proportional_ones() -> None:
    problem = in_segments(feed_forward(rows=64, width=32, inner=128, layers=4))
    lines = replace(LINES, all_reduce=Line(0, 1.0), grouped_all_gather=None, grouped_reduce_scatter=None)
    ops = tuple(replace(op, flops=op.flops * (100 if op.segment else 1), copyable=False) for op in problem.ops)
    problem, cluster = replace(problem, ops=ops), Cluster.on_paper([3e7, 1e7])
    result = search(problem, cluster, collectives=lines)
    assert result.ratios == (pytest.approx((0.5, 0.5)), pytest.approx((0.75, 0.25)))
    assert result.seconds < search(problem.in_one_segment(), cluster, collectives=lines).seconds


def test_parts_of_very_unequal_size_are_gathered_in_messages_and_equal_ones_padded() -> None:
    padded, grouped, dear = Line(1e-4, 1e-6), Line(2e-4, 1.3e-6), Line(9.0, 9e-3)
    lines = Collectives(padded, padded, dear, dear, padded, grouped, grouped)
    problem = feed_forward(rows=16, width=64, inner=512, layers=2)
    forms = {}
    for speeds in ([8e5, 1e5], [1e5, 1e5]):
        result = search(problem, Cluster.on_paper(speeds), collectives=lines)
        forms[speeds[0]] = {t.is_grouped for t in result.transfers if "gather" in t.change}
    assert forms == {8e5: {True}, 1e5: {False}}


def test_gradients_of_large_parameters_are_made_from_sufficient_factors() -> None:
    problem = feed_forward(rows=8, width=64, inner=64, layers=2)
    never_move = replace(problem, tensors=tuple(_immovable(t) for t in problem.tensors))
    lines = replace(LINES, all_gather=Line(0, 1e-7), grouped_all_gather=None, all_reduce=Line(0, 1e-5))
    cluster = Cluster.on_paper([3e8, 1e8])
    rules = (SynthesisRules(sufficient_factors=allowed, smallest_units=4) for allowed in (True, False))
    with_them, without = (search(never_move, cluster, collectives=lines, rules=given) for given in rules)
    assert with_them.seconds < without.seconds
    assert any(step.gathered for step in with_them.program.steps)
    assert "from sufficient factors" in {str(step.form).partition(", ")[2] for step in with_them.program.steps}


def _immovable(tensor: Tensor) -> Tensor:
    return replace(tensor, movable=tensor.kind == "parameter")


def test_what_does_not_fit_as_copies_is_split() -> None:
    problem = feed_forward(rows=512, width=64, inner=256, layers=2)
    ample = search(problem, Cluster.on_paper([3e7, 1e7]), collectives=LINES)
    most = [max(ample.held.on_device(i, ample.ratios) for i in (0, 1)) * share for share in (0.9, 0.5)]
    tight = Cluster.on_paper([3e7, 1e7], memory_bytes=[int(size / 0.9) for size in most])
    result = search(problem, tight, collectives=LINES)
    assert result.seconds >= ample.seconds
    assert all(result.held.on_device(i, result.ratios) <= most[i] * (1 + 1e-6) for i in (0, 1))


def test_what_fits_nowhere_is_refused_with_the_bytes() -> None:
    with pytest.raises(PlanError, match="no program fits the memory of 2 devices"):
        search(feed_forward(), Cluster.on_paper([3e5, 1e5], memory_bytes=1000))


def test_the_result_says_what_each_device_does_and_why() -> None:
    result = search(feed_forward(rows=16, width=64, inner=512, layers=2), UNEQUAL)
    assert result.why.startswith(f"{result.seconds - result.exchange_seconds:.4g} s of work")
    assert set(layouts(result)) >= {"0.up", "1.down", "loss"}


def test_more_devices_or_faster_ones_are_never_slower() -> None:
    problem = feed_forward(rows=256, width=64, inner=256, layers=3)
    link = Link(1e9, 1e-6)
    seconds = [
        search(problem, Cluster.on_paper(speeds, intra=link)).seconds
        for speeds in ([1e9], [1e9, 1e9], [2e9, 1e9], [2e9, 2e9])
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_searching_blocks_once_changes_no_result() -> None:
    problem = feed_forward(rows=64, layers=5)
    cluster = Cluster.on_paper([5e6, 3e6, 2e6])
    once, all_of_them = (search(one, cluster) for one in (problem, replace(problem, blocks=())))
    assert once.seconds == pytest.approx(all_of_them.seconds, rel=1e-9)


def test_parts_of_whole_indices_take_longer_than_ratios_say() -> None:
    few_rows = feed_forward(rows=3, width=2, inner=64)
    tensors = tuple(replace(t, element_bytes=1e-6) for t in few_rows.tensors)
    result = search(replace(few_rows, tensors=tensors), Cluster.on_paper([1e3, 1e3], intra=Link(1e12)))
    cut_rows = [step for step in result.program.steps if step.form.units == 3]
    assert bool(cut_rows) == (rounded_seconds(result) > result.seconds * 1.01)
    assert rounded_seconds(result) >= result.seconds * (1 - 1e-9)
