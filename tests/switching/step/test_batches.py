"""What is read from a call: rows, sizes, lengths and counts, and calls that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.comm_ops.wire.consensus import agree
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import BatchError
from hetu_fx.program.batch import batch_from_call
from hetu_fx.program.captures import Programs
from hetu_fx.switching.step.batches import ReadBatch, read_batch
from tests.model_zoo import SAMPLES


@pytest.fixture(scope="module")
def programs() -> Programs:
    programs = Programs(SAMPLES["llama"].model().train(), None)
    programs.first(SAMPLES["llama"].batch(4, 11), training=True)
    return programs


def read(programs: Programs, *args: Any, **kwargs: Any) -> ReadBatch:
    return read_batch(batch_from_call(programs.signature, args, kwargs), programs, training=True, shared=False)


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


def test_counts_are_those_of_each_batch(programs: Programs) -> None:
    ids = torch.ones(3, 9, dtype=torch.long)
    found = [read(programs, input_ids=ids, labels=torch.full((3, 9), label)).facts for label in (1, -100, 1)]
    assert [facts.counts for facts in found] == [(3 * 8,), (0,), (3 * 8,)]
    assert len({facts.signature for facts in found}) == 1


def test_a_batch_like_the_last_one_is_read_as_any_other(programs: Programs) -> None:
    first, again = (read(programs, **SAMPLES["llama"].batch(5, 9)) for _ in range(2))
    assert (first.facts, first.bindings, first.program) == (again.facts, again.bindings, again.program)
    shorter = read(programs, **SAMPLES["llama"].batch(5, 8))
    assert (shorter.facts.longest, shorter.facts.sizes) == (8, (8, 8))
    assert read(programs, **SAMPLES["llama"].batch(4, 9)).facts.rows == 4


def test_an_input_that_needs_a_gradient_is_told_each_time() -> None:
    programs = Programs(nn.Linear(3, 2), None)
    for needs in (False, True, True, False):
        batch = read(programs, torch.ones(2, 3, requires_grad=needs))
        assert ("gradients of ['input']" in batch.facts.signature) is needs
        assert list(batch.needing) == ["input"] * needs


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


class Tasks(nn.Module):
    """Does one of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 1)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](x).square().mean()


def test_several_tasks_in_one_step_are_refused_on_all_ranks_by_name() -> None:
    told: list[str] = []

    def step(table: GroupTable) -> None:
        programs = Programs(Tasks(), None)
        given = batch_from_call(programs.signature, (), {"x": torch.ones(2, 3), "task": "ab"[table.rank]})
        with pytest.raises(BatchError) as caught:
            agree(table, read_batch(given, programs, training=True, shared=False).facts)
        told.append(str(caught.value))

    run_in_threads(2, step)
    assert len(told) == 2
    assert all("input 'task' is 'a' on rank 0, 'b' on rank 1" in text for text in told)
    assert all("hint: " in text for text in told)
