import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.published_hydraulis import POOL, SCHEMES
from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.dispatch import dispatch
from hetu_fx.planner.dispatch.pack import pack
from hetu_fx.planner.dispatch.scheme_costs import SequenceBatch, Strategy
from tests.oracles.hydraulis_choice import BatchChoice, choose, holding, packed, refine
from tests.planner.dispatch.examples import BATCH, PACKED_MS

LONG_TAIL = SequenceBatch((*range(400, 2620, 37), 9000, 14000, 25000))


def lengths_of(choice: BatchChoice) -> Counter[tuple[tuple[int, ...], ...]]:
    """Return the lengths in the rows of each pipeline, without their order."""
    lengths = choice.dispatch.batch.lengths
    pipelines = [sorted(tuple(sorted(lengths[i] for i in row)) for row in rows) for rows in choice.micro_batches]
    return Counter(map(tuple, pipelines))


@pytest.mark.parametrize(("made", "milliseconds"), list(zip(POOL, PACKED_MS, strict=True)), ids=str)
def test_the_golden_batch_is_packed_as_well_as_by_the_authors(made: Strategy, milliseconds: int) -> None:
    assert packed(refine(dispatch(made, BATCH))).seconds <= 1.0005e-3 * milliseconds  # they are rounded


def test_the_golden_batch_chooses_the_authors_strategy() -> None:
    choice = choose(POOL, BATCH)
    assert choice.strategy == POOL[2]
    assert choice.seconds == pytest.approx(4.474, abs=0.0005)


@settings(max_examples=8)
@given(st.lists(st.integers(1, 25000), min_size=1, max_size=40), st.randoms())
def test_a_choice_drops_nothing_and_does_not_depend_on_the_order(lengths: list[int], shuffler: random.Random) -> None:
    choice = choose(POOL[1:4], SequenceBatch(tuple(lengths)), seed=1)
    held = [i for pipeline in choice.micro_batches for row in pipeline for i in row]
    assert sorted(held) == list(range(len(lengths)))
    shuffler.shuffle(lengths)
    again = choose(POOL[1:4], SequenceBatch(tuple(lengths)), seed=1)
    assert (again.strategy, again.considered) == (choice.strategy, choice.considered)
    assert lengths_of(again) == lengths_of(choice)


def test_strategies_that_are_not_packed_could_not_have_won() -> None:
    choice = choose(POOL, BATCH)
    left_out = [one for one in choice.considered if one.seconds is None]
    assert left_out
    for one in left_out:
        assert dispatch(one.strategy, BATCH).bound_seconds >= choice.seconds
    assert min(one.seconds for one in choice.considered if one.seconds is not None) == choice.seconds


def test_only_strategies_that_hold_the_longest_sequence_are_considered() -> None:
    choice = choose(POOL, LONG_TAIL)
    assert {one.strategy for one in choice.considered} == set(POOL[:5])
    assert holding([*POOL, *POOL], SequenceBatch((40000,))) == POOL[:4]


def test_a_batch_that_no_strategy_holds_is_refused() -> None:
    with pytest.raises(
        PlanError, match="sequence 1 of the batch has 50000 tokens, but none of the strategies holds more than 43520"
    ):
        choose(POOL, SequenceBatch((1, 50000)))
    with pytest.raises(PlanError, match="holds more than 0"):
        choose((), SequenceBatch((1,)))


@pytest.mark.parametrize("made", POOL[:5], ids=str)
def test_refining_gives_every_sequence_once_and_packs_no_worse(made: Strategy) -> None:
    first = dispatch(made, LONG_TAIL)
    refined = refine(first)
    assert refined.bound_seconds == first.bound_seconds <= refined.seconds
    assert packed(refined).seconds <= packed(first).seconds * 1.01


def test_refining_helps_where_sequences_of_a_small_pipeline_do_not_share_rows() -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(7.3, 1.2, 200), 64, 12000).astype(int)
    first = dispatch(POOL[4], SequenceBatch(tuple(lengths.tolist())))
    assert packed(refine(first)).seconds < 0.95 * packed(first).seconds


def test_the_last_pipeline_is_packed_with_care() -> None:
    choice = packed(dispatch(POOL[2], LONG_TAIL))
    last = max(choice.packings, key=lambda packing: packing.seconds)
    assert last == pack(last.scheme, last.lengths)


def test_packings_of_another_dispatch_are_refused() -> None:
    dispatched = dispatch(Strategy((SCHEMES[4, 1],)), SequenceBatch((100, 200)))
    with pytest.raises(PlanError, match="not the pipelines of the dispatch"):
        BatchChoice(dispatched, (pack(SCHEMES[4, 1], (100,)),))
