from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.published_hydraulis import POOL, SCHEMES, strategy
from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.dispatch import Dispatch, dispatch, unpacked_seconds
from hetu_fx.planner.dispatch.scheme_costs import SequenceBatch, Strategy
from tests.planner.dispatch.examples import BATCH, DISPATCH_MS, lengths_up_to, schemes


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[Strategy, SequenceBatch]:
    """Draw up to three pipelines and six sequences that the longest of them holds."""
    made = Strategy(tuple(draw(st.lists(schemes, min_size=1, max_size=3))))
    return made, SequenceBatch(tuple(draw(lengths_up_to(made.max_length, count=6))))


def best_of_all(made: Strategy, batch: SequenceBatch) -> float:
    """Try every assignment of sequences to pipelines."""
    found = []
    for receivers in product(range(len(made.pipelines)), repeat=len(batch.lengths)):
        groups = [
            [n for n, r in zip(batch.lengths, receivers, strict=True) if r == i] for i in range(len(made.pipelines))
        ]
        pairs = list(zip(made.pipelines, groups, strict=True))
        if all(max(group, default=0) <= scheme.max_length for scheme, group in pairs):
            found.append(max(unpacked_seconds(scheme, group) for scheme, group in pairs))
    return min(found)


def lengths_of(found: Dispatch) -> list[list[int]]:
    return [sorted(found.batch.lengths[i] for i in group) for group in found.pipelines]


@settings(max_examples=40)
@given(small_cases())
def test_small_dispatches_equal_exhaustive_search(case: tuple[Strategy, SequenceBatch]) -> None:
    found, best = dispatch(*case), best_of_all(*case)
    assert found.bound_seconds <= best * (1 + 1e-9)
    assert found.seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("made", "milliseconds"), list(zip(POOL, DISPATCH_MS, strict=True)), ids=str)
def test_the_golden_batch_is_dispatched_as_well_as_by_the_authors(made: Strategy, milliseconds: int) -> None:
    found = dispatch(made, BATCH)
    assert found.bound_seconds <= found.seconds <= 1.0005e-3 * milliseconds  # they are rounded
    assert found.seconds <= dispatch(made, BATCH, restarts=0).seconds * (1 + 1e-9)


def test_long_sequences_that_one_pipeline_holds_decide() -> None:
    # the 12k sequences fit only the pipeline of 16
    assert dispatch(POOL[3], BATCH).seconds == pytest.approx(6 * SCHEMES[16, 1].times.seconds(12000))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 20000), min_size=1, max_size=60), st.sampled_from(POOL[:3]), st.randoms())
def test_a_dispatch_drops_nothing_and_does_not_depend_on_the_order(
    lengths: list[int], made: Strategy, random: np.random.Generator
) -> None:
    found = dispatch(made, SequenceBatch(tuple(lengths)), seed=3)
    assert sorted(i for group in found.pipelines for i in group) == list(range(len(lengths)))
    random.shuffle(lengths)
    again = dispatch(made, SequenceBatch(tuple(lengths)), seed=3)
    assert lengths_of(found) == lengths_of(again)
    assert found.bound_seconds == again.bound_seconds


def test_many_unequal_sequences_come_close_to_the_bound() -> None:
    lengths = np.clip(np.random.default_rng(5).lognormal(7.0, 1.2, 200), 64, 7000).astype(int)
    found = dispatch(POOL[5], SequenceBatch(tuple(lengths.tolist())))
    assert found.seconds <= 1.01 * found.bound_seconds


def test_a_pipeline_without_sequences_idles() -> None:
    found = dispatch(POOL[0], SequenceBatch((5000,)))
    assert sorted(map(len, found.pipelines)) == [0, 0, 0, 1]
    assert found.seconds == SCHEMES[16, 1].times.seconds(5000)


def test_a_sequence_too_long_for_every_pipeline_is_refused() -> None:
    with pytest.raises(PlanError, match="sequence 1 of the batch has 30000 tokens, but no pipeline of 8x<tp 4, pp 2>"):
        dispatch(POOL[6], SequenceBatch((10, 30000)))


@pytest.mark.parametrize(
    ("pipelines", "what"),
    [
        (((0, 1),), "1 groups of sequences for the 2 pipelines"),
        (((0,), ()), r"\[1\] missing"),
        (((0, 1), (1,)), r"\[1\] twice"),
        (((0,), (1,)), r"sequences of \{1: 20000\} tokens"),
    ],
)
def test_dispatches_that_cannot_be_are_refused(pipelines: tuple[tuple[int, ...], ...], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        Dispatch(strategy((1, (8, 1)), (1, (4, 1))), SequenceBatch((100, 20000)), pipelines)
