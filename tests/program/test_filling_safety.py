"""Whether inputs can be filled up without a trace is found by trying: models of many kinds, and what fills them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hetu_fx.batches.packing import Filling
from hetu_fx.graph.graph import OutputKind
from hetu_fx.program.captures import Programs
from hetu_fx.program.filling_safety import pad_input, possible_fillings, way_of_filling
from tests import model_zoo as zoo

LENGTH = 13
CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "intermediate_size": 64,
    "vocab_size": 97,
}


def tokens(*, mask: bool = True, per_row: bool = False, **others: Tensor) -> dict[str, Tensor]:
    ids = torch.ones(4, LENGTH, dtype=torch.long)
    batch = {"input_ids": ids, "labels": torch.tensor([0, 1, 0, 1]) if per_row else ids.clone(), **others}
    return {**batch, "attention_mask": ids.clone()} if mask else batch


def differences(model: nn.Module, batch: dict[str, Tensor], *, training: bool = True, **paddings: int) -> set[str]:
    """Give the kinds of outputs that are others for longer inputs."""
    program = Programs(model, None).first(batch, training)
    _, found = way_of_filling(program, paddings, model.get_buffer)
    return {"nothing can be told" if one.kind is None else one.kind.value for one in found}


class Pooled(nn.Module):
    """A classifier of the mean of its tokens."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.masked = nn.Embedding(97, 8), nn.Linear(8, 3), masked

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        hidden, mask = self.embedding(input_ids), attention_mask[..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1) if self.masked else hidden.mean(1)
        return nn.functional.cross_entropy(self.head(pooled), labels)


class Tagger(nn.Module):
    """Scores of tokens; a convolution sees their neighbours, a batch norm all of them."""

    def __init__(self, between: nn.Module, ignored: int) -> None:
        super().__init__()
        self.embedding, self.between, self.head, self.ignored = nn.Embedding(97, 8), between, nn.Linear(8, 3), ignored

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        hidden = self.between(self.embedding(words).transpose(1, 2)).transpose(1, 2)
        scores = self.head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(scores, tags.flatten(), ignore_index=self.ignored)


MODELS = {
    "a causal model": (zoo.llama, tokens(mask=False)),
    "a causal model with a mask": (zoo.llama, tokens()),
    "positions of its own": (zoo.gpt2, tokens(position_ids=torch.arange(LENGTH).expand(4, LENGTH).clone())),
    "a masked language model": (zoo.bert, tokens()),
    "an encoder-decoder": (zoo.t5, {**tokens(), "labels": torch.ones(4, 9, dtype=torch.long)}),
    "a head that reads the first token": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**CONFIG)),
        tokens(per_row=True),
    ),
    "a mean over what the mask shows": (lambda: Pooled(masked=True), tokens(per_row=True)),
}
TRACED = {
    "a bidirectional model without a mask": (zoo.bert, tokens(mask=False)),
    "an encoder without a mask": (zoo.t5, {**tokens(mask=False), "labels": torch.ones(4, 9, dtype=torch.long)}),
    "a mean over all": (lambda: Pooled(masked=False), tokens(per_row=True)),
}


@pytest.mark.parametrize("name", MODELS)
def test_filling_leaves_no_trace_in(name: str) -> None:
    make, batch = MODELS[name]
    assert differences(make(), batch) == set()


@pytest.mark.parametrize("name", TRACED)
def test_filling_is_seen_by(name: str) -> None:
    make, batch = TRACED[name]
    assert "loss" in differences(make(), batch)


class Ordered(nn.Module):
    """A classifier of a series by what is in its middle, or at its top."""

    def __init__(self, take: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.take, self.head = take, nn.Linear(1, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.take(x)[:, None]), labels)


@pytest.mark.parametrize(
    "take",
    [lambda x: x.median(1).values, lambda x: x.amax(1), lambda x: x.topk(2, 1).values.sum(1)],
    ids=["middle", "top", "two at the top"],
)
def test_filling_is_seen_by_what_orders_a_series(take: Callable[[Tensor], Tensor]) -> None:
    batch = {"x": torch.randn(4, LENGTH), "labels": torch.tensor([0, 1, 0, 1])}
    assert "loss" in differences(Ordered(take), batch)


def test_what_a_head_takes_for_padding_must_be_what_fills_the_rows() -> None:
    model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**CONFIG, pad_token_id=9))
    assert "loss" in differences(model, tokens(per_row=True))
    assert differences(model, tokens(per_row=True), input_ids=9) == set()


@pytest.mark.parametrize(
    ("between", "seen"),
    [(nn.Identity(), False), (nn.Conv1d(8, 8, 3, padding=1), True), (nn.BatchNorm1d(8), True)],
)
def test_labels_are_told_by_the_loss_and_neighbours_are_seen(between: nn.Module, seen: bool) -> None:
    batch = {"words": torch.ones(4, LENGTH, dtype=torch.long), "tags": torch.ones(4, LENGTH, dtype=torch.long)}
    model = Tagger(between, -7)
    program = Programs(model, None).first(batch, training=True)
    assert possible_fillings(program.graph, {})[0].padding == {"tags": -7}
    assert bool(differences(model, batch)) is seen


class Checking(Tagger):
    """Raises for tags below a number, and for scores that no weights make."""

    def __init__(self, lowest: int) -> None:
        super().__init__(nn.Identity(), -7)
        self.lowest = lowest

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        if tags.min() < self.lowest:
            raise ValueError("a tag is too small")
        assert (self.embedding(words) < 99).all()
        return super().forward(words, tags)


@pytest.mark.parametrize(("lowest", "kinds"), [(-7, set()), (0, {OutputKind.COUNT.value})])
def test_a_check_of_values_sees_what_fills_them_where_it_raises_for_that(lowest: int, kinds: set[str]) -> None:
    batch = {"words": torch.ones(4, LENGTH, dtype=torch.long), "tags": torch.ones(4, LENGTH, dtype=torch.long)}
    assert differences(Checking(lowest), batch) == kinds


class Hiding(nn.Module):
    """A mean over the tokens that a mask does not hide."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        shown = (~hidden).to(x.dtype)[..., None]
        return self.head((x * shown).sum(1) / shown.sum(1)).square().mean()


def test_masks_that_are_true_where_something_is_hidden_are_filled_with_true() -> None:
    batch = {"x": torch.randn(4, LENGTH, 3), "hidden": torch.zeros(4, LENGTH, dtype=torch.bool)}
    program = Programs(Hiding(), None).first(batch, training=True)
    filling, found = way_of_filling(program, {}, Hiding().get_buffer)
    assert (filling.padding, found) == ({"hidden": 1}, ())


def test_values_that_mix_rows_and_tokens_are_told_apart_from_the_loss() -> None:
    assert differences(zoo.mixtral(), tokens()) == {OutputKind.VALUE.value}


def test_inputs_are_filled_at_their_end_and_positions_count_on() -> None:
    filling = Filling({"labels": -100}, "position_ids")
    ids = torch.tensor([[5, 6], [7, 8]])
    assert pad_input(ids, (2, 2), "input_ids", filling) is ids
    assert pad_input(ids, (2, 4), "input_ids", filling).tolist() == [[5, 6, 0, 0], [7, 8, 0, 0]]
    assert pad_input(ids, (2, 3), "labels", filling).tolist() == [[5, 6, -100], [7, 8, -100]]
    assert pad_input(ids, (2, 4), "position_ids", filling).tolist() == [[5, 6, 7, 8], [7, 8, 9, 10]]
    assert pad_input(ids[:0], (0, 1), "input_ids", filling).shape == (0, 1)
    assert pad_input(ids[:0], (0, 3), "position_ids", filling).shape == (0, 3)
