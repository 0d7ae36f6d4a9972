"""Sequences of a row are told apart by masks that follow from position ids; anything else in which tokens meet is not.

What is judged here is what decides between packing and rows of one sequence; that packed rows then train as each
sequence alone is tested with the runtime.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from hetu_fx.program.captures import Programs
from hetu_fx.program.filling_safety import why_not_packed, why_not_padded

WORDS = 19


class Reader(nn.Module):
    """A language model of one layer in which tokens meet as `meet` says."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.project = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        mixed = self.meet(self.project(self.embed(input_ids)), position_ids)
        return cross_entropy(self.head(mixed)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError


class ByPositions(Reader):
    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        number = (positions == 0).cumsum(1)
        mask = (number[:, :, None] == number[:, None]) & (positions[:, :, None] >= positions[:, None])
        return scaled_dot_product_attention(x, x, x, mask)


class Causal(Reader):
    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        return scaled_dot_product_attention(x + positions[..., None], x, x, is_causal=True)


class Everywhere(Reader):
    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        return scaled_dot_product_attention(x + positions[..., None], x, x)


class Shifted(ByPositions):
    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().meet(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1], positions)


class Pooled(ByPositions):
    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().meet(x, positions) + x.mean(1, keepdim=True)


class WithTable(ByPositions):
    """Adds a learned position to each token, of the table's rows that `places` says."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8)
        self.register_buffer("waves", torch.randn(64, 8))
        self.register_buffer("numbers", torch.arange(64))

    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().meet(x + self.places(positions), positions)

    def places(self, positions: Tensor) -> Tensor:
        return self.table(positions)


class CountsUp(WithTable):
    def places(self, positions: Tensor) -> Tensor:
        return self.table(torch.arange(positions.shape[1]))


class CountsNumbersOfABuffer(WithTable):
    def places(self, positions: Tensor) -> Tensor:
        return self.table(self.numbers[: positions.shape[1]])


class HasWaves(WithTable):
    def places(self, positions: Tensor) -> Tensor:
        return self.waves[: positions.shape[1]]


class CountsTokens(WithTable):
    def places(self, positions: Tensor) -> Tensor:
        return self.table((positions >= 0).cumsum(1))


class CutsTheTable(WithTable):
    def places(self, positions: Tensor) -> Tensor:
        return self.table.weight[: positions.shape[1]]


class ByCausalMask(ByPositions):
    """Makes its mask of positions and of places in the row, as transformers' models do."""

    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        number = (positions == 0).cumsum(1)
        places = torch.arange(positions.shape[1])
        mask = (number[:, :, None] == number[:, None]) & (places[:, None] >= places)
        return scaled_dot_product_attention(x, x, x, mask)


class ByOrder(Reader):
    """Its mask follows from position ids, but lets tokens see those of other sequences that stand as early."""

    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x, positions[:, :, None] >= positions[:, None])


class ByNumbers(Reader):
    """Its mask is what is added to scores."""

    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        number = (positions == 0).cumsum(1)
        hidden = (number[:, :, None] != number[:, None]) | (positions[:, :, None] < positions[:, None])
        return scaled_dot_product_attention(x, x, x, torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf))


class ByABuffer(Reader):
    """Its mask follows from what the model holds too, so that nobody knows what it will be."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("opens", torch.zeros(1, dtype=torch.bool))

    def meet(self, x: Tensor, positions: Tensor) -> Tensor:
        number = (positions == 0).cumsum(1)
        return scaled_dot_product_attention(x, x, x, (number[:, :, None] == number[:, None]) | self.opens)


def judged(kind: type[Reader]) -> tuple[str, str]:
    ids = torch.ones(3, 11, dtype=torch.int64)
    batch = {"input_ids": ids, "position_ids": torch.arange(11).expand(3, -1).clone(), "labels": ids.clone()}
    program = Programs(kind(), None).first(batch, training=True)
    known = program.graph, program.factors, program.flow
    return why_not_packed(*known, "position_ids"), why_not_padded(*known)


def test_a_mask_that_follows_from_positions_keeps_sequences_apart() -> None:
    packed, padded = judged(ByPositions)
    assert packed == ""
    assert "is not causal" in padded


def test_a_mask_of_numbers_that_are_added_keeps_sequences_apart_too() -> None:
    assert judged(ByNumbers)[0] == ""


@pytest.mark.parametrize("kind", [ByOrder, ByABuffer])
def test_a_mask_that_does_not_keep_a_packed_row_apart_is_found_out(kind: type[Reader]) -> None:
    assert "has no mask that follows from 'position_ids' and keeps sequences apart" in judged(kind)[0]


@pytest.mark.parametrize("kind", [WithTable, ByCausalMask])
def test_positions_that_are_given_and_places_in_masks_keep_sequences_apart(kind: type[Reader]) -> None:
    assert judged(kind)[0] == ""


@pytest.mark.parametrize("kind", [CountsUp, CountsNumbersOfABuffer, HasWaves, CountsTokens, CutsTheTable])
def test_activations_that_learn_their_place_in_the_row_are_not_packed(kind: type[Reader]) -> None:
    packed, _ = judged(kind)
    assert "in their row" in packed or "which takes no mask" in packed


def test_causal_attention_does_not_see_what_fills_a_row_but_sees_other_sequences() -> None:
    packed, padded = judged(Causal)
    assert "has no mask that follows from 'position_ids'" in packed
    assert padded == ""


def test_attention_without_a_mask_sees_everything() -> None:
    packed, padded = judged(Everywhere)
    assert "has no mask" in packed
    assert "is not causal" in padded


@pytest.mark.parametrize("kind", [Shifted, Pooled])
def test_tokens_that_meet_outside_attention_are_not_kept_apart(kind: type[Reader]) -> None:
    packed, padded = judged(kind)
    assert "which takes no mask" in packed
    assert padded, "what fills a row would be seen as well"
