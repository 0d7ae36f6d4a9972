"""Batches of sequences are read, and their micro-batches have rows and numbers of their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.batches.sampler import nested_batch
from hetu_fx.errors import BatchError
from hetu_fx.planner.dispatch.assignment import Assignment, PackedMicroBatch
from hetu_fx.switching.step.assigned_rows import first_rows, nested_sequences, row_plan


def test_nested_inputs_are_sequences() -> None:
    found = nested_sequences(nested_batch([[1, 2, 3], torch.tensor([4]), b"ab"], use_cache=False))
    assert found is not None
    assert found.lengths == (3, 1, 2)
    assert [part.tolist() for part in found.inputs["input_ids"]] == [[1, 2, 3], [4], [97, 98]]
    assert found.others == {"use_cache": False}


def test_a_batch_of_rows_has_none() -> None:
    assert nested_sequences({"input_ids": torch.ones(2, 3)}) is None
    assert nested_sequences((torch.ones(2, 3),)) is None


def test_rows_beside_sequences_are_refused() -> None:
    with pytest.raises(BatchError, match="come with sequences"):
        nested_sequences({**nested_batch([[1, 2]]), "mask": torch.ones(1, 2)})


def test_inputs_of_other_lengths_are_refused() -> None:
    batch = {"input_ids": nested_batch([[1, 2]])["input_ids"], "labels": nested_batch([[1]])["labels"]}
    with pytest.raises(BatchError, match="different lengths"):
        nested_sequences(batch)


def test_sequences_of_unlike_inputs_are_refused() -> None:
    with pytest.raises(BatchError, match="all of the same"):
        nested_batch([[1], {"input_ids": [1]}])
    with pytest.raises(BatchError, match="one or more"):
        nested_batch([])


def test_rows_are_counted_over_pipelines() -> None:
    pipelines = (
        (PackedMicroBatch(((0,), (1,)), 4), PackedMicroBatch(((2,),), 3)),
        (),
        (PackedMicroBatch(((3, 4),), 9),),
    )
    plan = row_plan(Assignment("any", pipelines, 0.0), world_size=2, sequences=9)
    assert plan.pipelines == (range(0, 3), range(3, 3), range(3, 4))
    assert plan.micro_batches == ((range(0, 2), range(2, 3)), (), (range(3, 4),))
    assert plan.owned == (range(0, 4), range(0, 4))


@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=8))
def test_no_two_micro_batches_draw_for_one_row_or_token(sizes: list[tuple[int, int]]) -> None:
    micro_batches = [PackedMicroBatch(((0,),) * rows, width) for rows, width in sizes]
    starts = first_rows(micro_batches)
    rows = [set(range(start, start + count)) for start, (count, _) in zip(starts, sizes, strict=True)]
    tokens = [
        set(range(start * width, (start + count) * width)) for start, (count, width) in zip(starts, sizes, strict=True)
    ]
    for numbers in (rows, tokens):
        assert len(set.union(*numbers)) == sum(map(len, numbers))
