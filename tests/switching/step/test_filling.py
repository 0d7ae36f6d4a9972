"""Batches are filled up to agreed sizes, outputs are cut to what was brought, and what would change is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.errors import BatchError
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.captures import Programs
from hetu_fx.switching import graph_execution
from hetu_fx.switching.step import graph_step
from hetu_fx.switching.step.batches import MicroBatchRows, ReadBatch, read_batch
from hetu_fx.switching.step.filling import Fillings, as_brought, filled_share, narrow_to_own_rows
from hetu_fx.switching.step.rows import RowPlan
from tests.model_zoo import bert, causal_batch, llama, mixtral


def read(model: nn.Module, **options: Any) -> ReadBatch:
    batch = {**causal_batch(3, 7), **options}
    return read_batch(batch, Programs(model, None), training=True, shared=False)


def agreed(batch: ReadBatch, size: int, *, differ: bool = True) -> StepFacts:
    sizes = tuple(
        (length,) * len(batch.facts.sizes) for length in ((min(7, size - 1), size) if differ else (size, size))
    )
    return replace(StepFacts(), sizes_of=sizes)


def test_inputs_and_symbols_are_those_of_the_longest_and_outputs_those_of_what_was_brought() -> None:
    model = llama()
    batch = read(model)
    longer = Fillings(model).filled(batch, agreed(batch, 10), wants_values=True)
    assert {tuple(tensor.shape) for tensor in longer.tensors.values()} == {(3, 10)}
    assert (longer.tensors["labels"][:, 7:] == -100).all()
    assert (set(batch.bindings.values()), set(longer.bindings.values())) == ({3, 7}, {3, 10})
    logits = {"logits": torch.zeros(3, 10, 97)}
    assert as_brought(longer, logits)["logits"].shape == (3, 7, 97)
    assert as_brought(batch, logits)["logits"].shape == (3, 10, 97)


def test_a_model_that_sees_the_filling_is_refused_only_where_ranks_with_rows_differ() -> None:
    model = bert()
    batch = read(model)
    fill = partial(Fillings(model).filled, batch, wants_values=False)
    with pytest.raises(BatchError, match=r"input_ids': 10.* 'loss' is another one.*\nhint: .*attention_mask"):
        fill(agreed(batch, 10))
    assert fill(agreed(batch, 10, differ=False)).tensors["input_ids"].shape == (3, 10)


def test_an_output_that_cannot_be_cut_is_refused_only_where_it_is_wanted() -> None:
    model = mixtral()
    batch = read(model, attention_mask=torch.ones(3, 7, dtype=torch.long))
    fill = partial(Fillings(model).filled, batch, agreed(batch, 10))
    assert fill(wants_values=False).tensors["input_ids"].shape == (3, 10)  # the loss is the same
    with pytest.raises(BatchError, match=r"value 'router_logits.0'"):
        fill(wants_values=True)


def test_unequal_sizes_are_refused_on_every_rank_where_the_graph_fixes_them() -> None:
    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[:, at].tanh() for at in range(x.shape[1])]).mean()

    model = Steps()
    batch = read_batch({"x": torch.randn(3, 7)}, Programs(model, None), training=True, shared=False)
    for size in (7, 10):
        with pytest.raises(
            BatchError, match="dim 1 of input 'x' is not the same on all ranks, but the model's forward fixes it"
        ):
            Fillings(model).filled(batch, agreed(batch, size), wants_values=False)


def test_micro_batches_are_as_wide_as_the_rows_of_the_ranks_that_have_brought_theirs() -> None:
    model = llama()
    batch = Fillings(model).filled(read(model), agreed(read(model), 10), wants_values=False)
    rows = RowPlan((range(0, 3), range(3, 4)), (range(0, 4),), ((range(0, 2), range(2, 4)),))
    cuts = [MicroBatchRows(batch.tensors, 2, first, batch.bindings) for first in (0, 2)]
    narrow = [narrow_to_own_rows(batch, cut, rows) for cut in cuts]
    assert [cut.tensors["labels"].shape[1] for cut in narrow] == [7, 10]  # the second has a row of rank 1's too
    assert [max(cut.bindings.values()) for cut in narrow] == [7, 10]
    assert filled_share(narrow, cuts) == 17 / 20
    nothing = replace(cuts[0], rows=0)
    assert narrow_to_own_rows(batch, nothing, rows) is nothing


def test_narrow_micro_batches_add_up_to_the_loss_and_gradients_of_the_filled_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = torch.arange(10) < torch.tensor([[7], [5], [10], [9]])  # as two ranks bring them, of 7 and of 10 tokens
    ids = torch.where(shown, torch.randint(1, 97, (4, 10), generator=torch.Generator().manual_seed(0)), 0)
    batch = {"input_ids": ids, "attention_mask": shown.long(), "labels": ids.masked_fill(~shown, -100)}
    plan = Plan((Pipeline((Stage((0,)),), micro_batches=2),))
    widths: list[int] = []

    def trained() -> list[Tensor]:
        model = hetu_fx.auto_parallelize(small_llama(), batch, plan=plan)
        loss = model(**batch).loss
        loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters())]

    def read_as_two(*args: Any, **options: Any) -> ReadBatch:
        one = read_batch(*args, **options)
        return replace(one, sizes_of=((7, 7, 7), (10, 10, 10)))

    def narrow(one: ReadBatch, cut: MicroBatchRows, rows: RowPlan) -> MicroBatchRows:
        made = narrow_to_own_rows(one, cut, replace(rows, owned=(range(0, 2), range(2, 4))))
        widths.append(made.tensors["labels"].shape[1])
        return made

    expected = trained()
    monkeypatch.setattr(graph_execution, "read_batch", read_as_two)
    monkeypatch.setattr(graph_step, "narrow_to_own_rows", narrow)
    for one, other in zip(trained(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert widths == [7, 10]


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    return llama().double().train()
