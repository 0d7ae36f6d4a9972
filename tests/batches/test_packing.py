"""Packed rows train as each sequence alone would."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hetu_fx
from hetu_fx.batches.packing import IGNORED, pack_batch, rows_by_room
from hetu_fx.errors import BatchError
from tests.model_zoo import llama


@given(lengths=st.lists(st.integers(1, 30), max_size=15), room=st.integers(30, 60))
def test_every_sequence_has_one_row_and_no_row_is_too_long(lengths: list[int], room: int) -> None:
    rows = rows_by_room(lengths, room)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= room for row in rows)
    halves = [row for row in rows if 2 * sum(lengths[i] for i in row) <= room]
    assert len(halves) <= 1, "two rows that are half empty would be one"


def test_positions_restart_and_no_sequence_predicts_the_next() -> None:
    batch = pack_batch([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [(1, 0)], multiple=4, padding=1)
    assert batch["input_ids"].tolist() == [[8, 9, 5, 6, 7, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert batch["labels"].tolist() == [[IGNORED, 9, IGNORED, 6, 7, IGNORED, IGNORED, IGNORED]]


@pytest.mark.parametrize("is_parallel", [False, True])
def test_packed_sequences_train_as_each_alone(is_parallel: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    model = llama().double()
    alone = copy.deepcopy(model)
    vocabulary = model.config.vocab_size
    lengths = (7, 3, 9, 4)
    sequences = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
    batch = pack_batch(sequences, rows_by_room(lengths, 12), multiple=4)
    if is_parallel:
        hetu_fx.auto_parallelize(model, batch, plan=hetu_fx.Plan.single())
    model(**batch).loss.backward()
    predicted = sum(length - 1 for length in lengths)
    for sequence in sequences:
        loss = alone(input_ids=sequence[None], labels=sequence[None]).loss
        (loss * (len(sequence) - 1) / predicted).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-6, atol=1e-7)  # the loss is made in float32


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else hetu_fx.full_tensor(tensor)


@pytest.mark.parametrize("rows", [[(0,)], [(0, 1), (1,)], [(0, 1), ()], []])
def test_a_sequence_in_no_row_or_in_two_is_refused(rows: list[tuple[int, ...]]) -> None:
    with pytest.raises(BatchError, match="hint: put each in one row"):
        pack_batch([torch.tensor([1]), torch.tensor([2])], rows)


def test_what_is_no_sequence_of_tokens_is_refused() -> None:
    with pytest.raises(BatchError, match=r"sequences \[0\] are not token ids"):
        pack_batch([torch.ones(1, 2)], [(0,)])


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(BatchError, match="5 tokens does not fit a row of 4"):
        rows_by_room([5], 4)
