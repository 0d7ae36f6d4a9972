"""Small models are made of a template that keeps a few numbers of each parameter, and the structure of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hetu_fx.check.model import ModelTemplate, Narrowing
from hetu_fx.errors import StateError
from tests.check.nets import Tokens, tokens_batch

NARROW = Narrowing({1500: 140})


class Tied(nn.Module):
    """Has one parameter in two places, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2000, 8), nn.Linear(8, 2000, bias=False)
        self.head.weight = self.table.weight
        self.norm = nn.BatchNorm1d(8)


def test_a_model_is_made_short_narrow_and_in_float64_and_the_first_one_stays() -> None:
    model = Tokens()
    before = copy.deepcopy(model.state_dict())
    template = ModelTemplate.of(model, None)
    made, _ = template.made({"blocks.1", "blocks.3", "blocks.4"}, NARROW, torch.float64)
    assert [name for name, _ in made.named_children()] == ["table", "blocks", "head"]
    assert len(made.blocks) == 2
    assert made.head.weight.shape == (140, 8)
    assert made.tokens == made.table.num_embeddings == 140
    assert {p.dtype for p in made.parameters()} == {torch.float64}
    assert torch.equal(made.blocks[1].up.weight, model.blocks[2].up.weight.double())
    batch = {name: NARROW.numbers(x) for name, x in tokens_batch().items()}
    made(**batch).backward()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert len(model.blocks) == 5


def test_what_is_tied_stays_so_and_what_is_alike_is_moved() -> None:
    made, _ = ModelTemplate.of(Tied(), None).made((), Narrowing(), torch.float64)
    assert made.head.weight is made.table.weight
    assert len(made.norm.weight.unique()) == 8
    assert len(made.norm.bias.unique()) == 8
    assert made.norm.num_batches_tracked.dtype == torch.int64
    assert made.norm.running_var.dtype == torch.float64


def test_rows_of_a_large_parameter_are_not_alike() -> None:
    made, _ = ModelTemplate.of(nn.Linear(509, 30), None).made((), Narrowing(), torch.float64)
    assert len(made.weight.unique(dim=0)) == 30


def test_a_loss_module_comes_along() -> None:
    _, loss_fn = ModelTemplate.of(Tied(), nn.CrossEntropyLoss(weight=torch.ones(3))).made(
        (), Narrowing(), torch.float64
    )
    assert isinstance(loss_fn, nn.CrossEntropyLoss)
    assert loss_fn.weight.dtype == torch.float64


def test_blocks_in_no_list_cannot_be_left_out() -> None:
    class Named(nn.ModuleDict):
        pass

    model = nn.Module()
    model.blocks = Named({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
    with pytest.raises(StateError, match="the blocks are in 'blocks', a Named, which cannot be shortened"):
        ModelTemplate.of(model, None).made({"blocks.1"}, Narrowing(), torch.float64)
