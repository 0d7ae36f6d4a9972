"""Batches are filled up to agreed sizes, outputs are cut to what was brought, and what would change is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.errors import BatchError
from hetu_fx.program.captures import Programs
from hetu_fx.switching.step.batches import ReadBatch, read_batch
from hetu_fx.switching.step.filling import Fillings, as_brought
from tests.model_zoo import bert, causal_batch, llama, mixtral


def read(model: nn.Module, **options: Any) -> ReadBatch:
    batch = {**causal_batch(3, 7), **options}
    return read_batch((), batch, Programs(model, None), training=True, shared=False)


def agreed(batch: ReadBatch, size: int, *, differ: bool = True) -> StepFacts:
    places = range(len(batch.facts.sizes))
    return replace(StepFacts(), sizes=tuple(size for _ in places), unequal_sizes=tuple(places) if differ else ())


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
    with pytest.raises(BatchError, match=r"of input 'input_ids': 10.* loss 'loss' is another one.*attention_mask"):
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
    batch = read_batch((torch.randn(3, 7),), {}, Programs(model, None), training=True, shared=False)
    for size in (7, 10):
        with pytest.raises(
            BatchError, match="dim 1 of input 'x' is not the same on all ranks, but the model's forward fixes it"
        ):
            Fillings(model).filled(batch, agreed(batch, size), wants_values=False)
