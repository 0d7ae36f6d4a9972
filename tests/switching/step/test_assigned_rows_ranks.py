"""Sequences of mixed lengths train as each alone would, under every kind of plan; on four gloo ranks."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hetu_fx
from hetu_fx.errors import BatchError
from hetu_fx.planner.dispatch.assignment import Batching
from hetu_fx.planner.dispatch.policies import HotSPa, Hydraulis
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.model_zoo import VOCABULARY, llama
from tests.planner.examples import paper
from tests.ranks.checks import assert_all_pass

WORLD = 4
LENGTHS = (7, 3, 9, 4, 20, 1, 12, 5, 5)
OTHERS = (16, 2, 6, 6, 3)
TOLERANCE = 1e-10


@pytest.mark.distributed
@pytest.mark.timeout(1000)
def test_mixed_lengths_on_four_ranks(gloo_checks: Callable[..., dict[str, list[str | None]]]) -> None:
    assert_all_pass(gloo_checks(__file__, WORLD, 900), WORLD)


def one(*stages: Stage, rows: int = 1, max_length: int | None = None) -> Pipeline:
    return Pipeline(stages, share=rows, max_length=max_length)


TWO_AND_TWO = Plan((one(Stage((0, 1))), one(Stage((2,)), Stage((3,)), max_length=10)), name="TP2 + PP2", max_length=32)
UNEVEN = Plan(
    (one(Stage((0,), blocks=1), Stage((1, 2), (2, 1), blocks=1)), one(Stage((3,)), max_length=8)),
    name="3+1",
    max_length=32,
)
REPLICAS = Plan(tuple(one(Stage((rank,))) for rank in range(WORLD)), name="DP4", max_length=24)
LONG = Plan((one(Stage((0, 1)), Stage((2, 3))),), name="TP2 x PP2", max_length=32)
CHUNKS = Plan(
    (one(Stage((0, 1)), Stage((2,))), one(Stage((3,)), max_length=8)),
    schedule="interleaved",
    name="in chunks",
    max_length=32,
)
PLANS = (TWO_AND_TWO, UNEVEN, REPLICAS, LONG)
GROUPS = HotSPa((4, 24), ("DP4", "TP2 + PP2", "TP2 x PP2"), Batching.DISPATCHED)


def in_double(output: Any, labels: Tensor, **_: object) -> Tensor:
    """Give the causal loss in the logits' own dtype; transformers' models round to float32."""
    logits = output["logits"]
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sequences(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def nested(parts: Sequence[Tensor]) -> dict[str, Any]:
    tensor = torch.nested.nested_tensor(list(parts), layout=torch.jagged)
    return {"input_ids": tensor, "labels": tensor.clone(), "use_cache": False}


class Neighbours(nn.Module):
    """A language model whose tokens see the two before them in a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 12), nn.Linear(12, VOCABULARY)
        self.mix = nn.Conv1d(12, 12, 3, padding=2)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = False) -> dict[str, Tensor]:
        mixed = self.mix(self.embed(input_ids).transpose(1, 2))[..., : input_ids.shape[1]]
        return {"logits": self.head(mixed.transpose(1, 2).tanh())}


class Alone:
    """A plain model that runs each sequence alone, and a parallel one that runs them all at once."""

    def __init__(self, make: Callable[[], nn.Module], plans: Sequence[Plan]) -> None:
        torch.manual_seed(0)
        self.plain = make().double().train()
        self.model = copy.deepcopy(self.plain)
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (self.plain, self.model)]
        rows = torch.ones(3, 11, dtype=torch.int64)
        example = {"input_ids": rows, "labels": rows.clone(), "use_cache": False}
        hetu_fx.auto_parallelize(self.model, example, plan=list(plans), data="global", loss_fn=in_double)

    def expected(self, parts: Sequence[Tensor]) -> float:
        predicted = sum(len(part) - 1 for part in parts)
        total = 0.0
        for part in parts:
            if len(part) > 1:
                loss = in_double(self.plain(input_ids=part[None], use_cache=False), part[None])
                share = loss * (len(part) - 1) / predicted
                share.backward()
                total += share.item()
        return total

    def step(self, parts: Sequence[Tensor]) -> None:
        expected = self.expected(parts)
        loss = self.model(**nested(parts)).loss
        loss.backward()
        assert abs(loss.item() - expected) < TOLERANCE * expected, (loss.item(), expected)
        self.update()

    def update(self) -> None:
        """Compare the gradients, step both optimizers and forget the gradients."""
        self.same_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def same_gradients(self) -> None:
        floor = 1e-5 * max(float(p.grad.norm()) for p in self.plain.parameters() if p.grad is not None)
        for (name, plain), home in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            found: Any = home.grad
            difference = float((found.full_tensor() - plain.grad).norm() / (plain.grad.norm() + floor))
            assert difference < TOLERANCE, f"{name} differs by {difference:.1e}"


@functools.cache
def made() -> Alone:
    return Alone(llama, PLANS)


def llamas() -> Alone:
    """Give the one pair that most checks train on, as it was made."""
    pair = made()
    pair.model.hetu.release()
    pair.model.hetu.sequences.policy = Hydraulis()
    return pair


def check_evaluation_gives_the_loss(rank: int, world: int, folder: Path) -> None:
    pair = llamas()
    with torch.no_grad():
        found = pair.model(**nested(sequences(LENGTHS))).loss.item()
    assert abs(found - pair.expected(sequences(LENGTHS))) < TOLERANCE * found
    pair.plain.zero_grad()


def check_a_model_that_cannot_keep_sequences_apart(rank: int, world: int, folder: Path) -> None:
    """Its tokens meet in a convolution: only sequences of one length share a micro-batch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair = Alone(Neighbours, (REPLICAS,))
        pair.step(sequences(LENGTHS))
    assert any("only beside others of the same length" in str(warning.message) for warning in caught)


def check_groups_of_lengths_add_up(rank: int, world: int, folder: Path) -> None:
    """As HotSPa: short sequences on one variant, long ones on another, and the gradients are those of one step."""
    pair = llamas()
    pair.model.hetu.sequences.policy = GROUPS
    for seed in range(2):
        pair.step(sequences((*LENGTHS, 30), seed))
        assert pair.model.hetu.stats["variant"] == "TP2 x PP2"


def check_gradients_are_kept_back_over_variants(rank: int, world: int, folder: Path) -> None:
    """Under no_sync a batch in three groups and one on a single variant add up to both."""
    pair = llamas()
    pair.model.hetu.sequences.policy = GROUPS
    first, second = sequences((*LENGTHS, 30)), sequences(OTHERS, 1)
    for parts in (first, second):
        pair.expected(parts)
        with pair.model.no_sync() if parts is first else nullcontext():
            pair.model(**nested(parts)).loss.backward()
        pair.model.hetu.sequences.policy = Hydraulis()
    pair.update()


def check_batches_are_planned_ahead(rank: int, world: int, folder: Path) -> None:
    pair = llamas()
    before = pair.model.hetu.stats["planning"].batches
    batches = [nested(sequences(LENGTHS, seed)) for seed in range(2)]
    for batch in pair.model.hetu.ahead(batches):
        pair.model(**batch).loss.backward()
    assert pair.model.hetu.stats["planning"].batches == before + 2
    pair.model.zero_grad()


def check_every_way_of_batching(rank: int, world: int, folder: Path) -> None:
    pair = llamas()
    pair.model.hetu.switch("DP4")
    for batching in sorted(set(Batching) - {Batching.ALIKE}):
        pair.model.hetu.sequences.policy = Hydraulis(batching)
        pair.step(sequences(LENGTHS))


def check_the_strategy_is_chosen_among_those_that_hold_the_longest(rank: int, world: int, folder: Path) -> None:
    pair = llamas()
    pair.step(sequences((30, 2, 2)))
    assert pair.model.hetu.stats["variant"] != "DP4"
    with pytest.raises(BatchError, match="no variant takes a sequence of 33 tokens"):
        pair.model(**nested(sequences((33, 2))))


def check_every_strategy(rank: int, world: int, folder: Path) -> None:
    pair = llamas()
    for seed, plan in enumerate(PLANS):
        pair.model.hetu.switch(plan.name)
        pair.step(sequences(LENGTHS, seed))
        assert pair.model.hetu.stats["variant"] == plan.name
    pair.step(sequences(OTHERS))


def check_stages_in_chunks(rank: int, world: int, folder: Path) -> None:
    pair = Alone(functools.partial(llama, num_hidden_layers=5), (CHUNKS,))
    for seed in range(2):
        pair.step(sequences(LENGTHS, seed))
    pair.step(sequences(OTHERS))
    work = pair.model.hetu._runtime.report.work
    assert sorted(rank for rank, seconds in work(paper(1, 1, 1, 1)).items() if seconds) == [0, 1, 2, 3]


def check_a_model_that_is_told_not_to_pack(rank: int, world: int, folder: Path) -> None:
    """Rows of one sequence are filled up to a multiple, as causal attention does not see that."""
    pair = llamas()
    pair.model.hetu.sequences.options = hetu_fx.SequenceOptions(packs=False, multiple=8)
    pair.step(sequences(LENGTHS))
    assert pair.model.hetu.stats["rows"] != (len(LENGTHS),)
