"""What is read from a call: rows, sizes, lengths and counts, and calls that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetu_fx.errors import BatchError
from hetu_fx.program.batch import batch_of
from hetu_fx.program.captures import Programs
from hetu_fx.switching.step.batches import ReadBatch, read_batch
from tests.model_zoo import SAMPLES


@pytest.fixture(scope="module")
def programs() -> Programs:
    programs = Programs(SAMPLES["llama"].model().train(), None)
    programs.first(SAMPLES["llama"].batch(4, 11), training=True)
    return programs


def read(programs: Programs, *args: Any, **kwargs: Any) -> ReadBatch:
    return read_batch(batch_of(programs.signature, args, kwargs), programs, training=True, shared=False)


def test_facts_are_rows_lengths_sizes_and_counts(programs: Programs) -> None:
    labels = torch.ones(3, 9, dtype=torch.long)
    labels[0, :5] = -100
    facts = read(programs, input_ids=torch.ones(3, 9, dtype=torch.long), labels=labels).facts
    assert (facts.rows, facts.longest) == (3, 9)
    assert dict(zip(facts.size_names, facts.sizes, strict=True)) == {
        "dim 1 of input 'input_ids'": 9,
        "dim 1 of input 'labels'": 9,
    }
    assert facts.counts == (3 * 8 - 4,)  # labels are shifted by one token


def test_a_tensor_of_no_dim_is_a_number_that_all_ranks_must_bring(programs: Programs) -> None:
    ids = torch.ones(2, 9, dtype=torch.long)
    facts = read(programs, input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(37)).facts
    assert (facts.value_names, facts.values) == (("input 'num_items_in_batch'",), (37.0,))


def test_a_batch_without_rows_counts_nothing(programs: Programs) -> None:
    batch = read(programs, **SAMPLES["llama"].batch(0, 9))
    assert (batch.facts.rows, batch.facts.counts) == (0, (0.0,))


def test_positional_and_keyword_calls_are_one_form(programs: Programs) -> None:
    ids = torch.ones(2, 9, dtype=torch.long)
    by_position, by_keyword = read(programs, ids, labels=ids), read(programs, input_ids=ids, labels=ids)
    assert by_position.program is by_keyword.program
    assert by_position.facts == by_keyword.facts


def test_the_batch_symbol_stands_for_this_ranks_rows(programs: Programs) -> None:
    batch = read(programs, **SAMPLES["llama"].batch(5, 9))
    assert batch.bindings[batch.program.graph.batch_symbol] == 5


def test_inputs_with_different_rows_are_refused(programs: Programs) -> None:
    with pytest.raises(BatchError, match=r"different numbers of rows: \{'input_ids': 2, 'labels': 3\}"):
        read(programs, input_ids=torch.ones(2, 9, dtype=torch.long), labels=torch.ones(3, 9, dtype=torch.long))


def test_an_argument_that_forward_does_not_have_is_refused(programs: Programs) -> None:
    with pytest.raises(BatchError, match="does not fit the model's forward: too many positional"):
        read(programs, *[torch.ones(2, 9)] * 40)
