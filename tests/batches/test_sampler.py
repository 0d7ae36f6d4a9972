"""Token budgets are met exactly, and every token comes once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hetu_fx.batches.sampler import Piece, Pieces, TokenBudgetSampler
from hetu_fx.errors import BatchError

lengths_given = st.lists(st.integers(0, 40), max_size=12)


def tokens_of(batches: list[list[Piece]]) -> Counter[tuple[int, int]]:
    return Counter((p.index, at) for batch in batches for p in batch for at in range(p.start, p.stop))


@given(lengths=lengths_given, tokens=st.integers(1, 50), longest=st.none() | st.integers(1, 20), seed=st.integers(0, 9))
def test_every_token_comes_once_and_every_batch_but_the_last_is_full(
    lengths: list[int], tokens: int, longest: int | None, seed: int
) -> None:
    sampler = TokenBudgetSampler(lengths, tokens, longest=longest, seed=seed)
    batches = list(sampler)
    assert tokens_of(batches) == {(i, at): 1 for i, length in enumerate(lengths) for at in range(length)}
    assert all(sum(map(len, batch)) == tokens for batch in batches[:-1])
    assert all(len(piece) <= (longest or 40) for batch in batches for piece in batch)
    assert len(batches) == len(TokenBudgetSampler(lengths, tokens))


@given(lengths=lengths_given, tokens=st.integers(1, 50), stop=st.integers(0, 10))
def test_a_sampler_goes_on_where_another_stood(lengths: list[int], tokens: int, stop: int) -> None:
    whole = list(TokenBudgetSampler(lengths, tokens))
    first = TokenBudgetSampler(lengths, tokens)
    seen = [batch for batch, _ in zip(first, range(stop), strict=False)][:stop]
    if len(seen) < min(stop, len(whole)) or stop == 0 or stop >= len(whole):
        return
    second = TokenBudgetSampler(lengths, tokens)
    second.load_state_dict({"epoch": 0, "batches_done": len(seen)})
    assert seen + list(second) == whole


def test_the_state_counts_what_was_yielded() -> None:
    sampler = TokenBudgetSampler([5, 5, 5], 4)
    batches = iter(sampler)
    next(batches), next(batches)
    assert sampler.state_dict() == {"epoch": 0, "batches_done": 2}
    list(batches)
    assert sampler.state_dict() == {"epoch": 1, "batches_done": 0}


def test_epochs_have_orders_of_their_own_that_a_number_brings_back() -> None:
    sampler = TokenBudgetSampler([1] * 50, 10)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_without_shuffling_sequences_come_as_they_stand() -> None:
    sampler = TokenBudgetSampler([3, 4], 5, shuffle=False)
    assert list(sampler) == [[Piece(0, 0, 3), Piece(1, 0, 2)], [Piece(1, 2, 4)]]


def test_a_data_loader_reads_pieces() -> None:
    text = [torch.arange(5), torch.arange(10, 13)]
    sampler = TokenBudgetSampler([5, 3], 4, shuffle=False)
    loader = DataLoader(Pieces(text), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    assert [[part.tolist() for part in batch] for batch in loader] == [[[0, 1, 2, 3]], [[4], [10, 11, 12]]]


def test_lengths_of_another_data_set_are_refused() -> None:
    with pytest.raises(BatchError, match="sequence 0, which has 2 tokens"):
        Pieces(["ab"])[Piece(0, 1, 4)]


@pytest.mark.parametrize(("lengths", "tokens", "longest"), [([1], 0, None), ([1], 1, 0), ([-1], 1, None)])
def test_sizes_that_cannot_be_are_refused(lengths: list[int], tokens: int, longest: int | None) -> None:
    with pytest.raises(BatchError, match="give"):
        TokenBudgetSampler(lengths, tokens, longest=longest)
