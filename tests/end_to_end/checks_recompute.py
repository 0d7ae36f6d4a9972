"""Checks of blocks that are computed again in backward; run by test_state_features.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.plans.plan import Attention, Plan, Stage
from tests.end_to_end.checks_variants import with_dropout
from tests.end_to_end.twins import Twins, batch_of, gradients_of, loss_of, one, rows_of, world_of


def _context(attention: Attention, recompute: int, name: str | None = None) -> Plan:
    stage = Stage((0, 1), (3, 1), context=2, recompute=recompute)
    return Plan((one(stage),), name=name, attention=attention)


# In pairs: everything kept, then some or all blocks recomputed, unlike on unlike stages and replicas.
PAIRS = {
    "TP": (Plan((one(Stage((0, 1), (2, 1))),)), Plan((one(Stage((0, 1), (2, 1), recompute=2)),))),
    "sequence parallel": (
        Plan((one(Stage((0, 1), (2, 1)), micro_batches=2),), sequence_parallel=True),
        Plan(
            (one(Stage((0, 1), (2, 1), recompute=1, recompute_ops="pointwise"), micro_batches=2),),
            sequence_parallel=True,
        ),
    ),
    "CP": (_context("gathered", 0), _context("gathered", 2)),
    "1F1B": (
        Plan((one(Stage((0,)), Stage((1,)), micro_batches=3),)),
        Plan((one(Stage((0,), recompute=1), Stage((1,), recompute=1, recompute_ops="attention"), micro_batches=3),)),
    ),
    "GPipe": (
        Plan((one(Stage((0,)), Stage((1,)), micro_batches=3),), schedule="gpipe"),
        Plan((one(Stage((0,)), Stage((1,), recompute=1), micro_batches=3),), schedule="gpipe"),
    ),
    "DP": (
        Plan((one(Stage((0,)), rows=3), one(Stage((1,))))),
        Plan((one(Stage((0,), recompute=1), rows=3), one(Stage((1,), recompute=2, recompute_ops="pointwise")))),
    ),
}


def same_bits(model: nn.Module, batch: dict[str, Tensor], counts: tuple[int, ...], pairs: dict[str, list[str]]) -> None:
    """Take the same step under both plans of each pair; compare the losses and all gradients."""
    for names in pairs.values():
        found = []
        for name in names:
            model.hetu.switch(name)
            model.hetu._runtime.step = 0  # the same random numbers again
            loss = loss_of(model(**rows_of(batch, counts)))
            loss.backward()
            found.append((loss.detach(), gradients_of(model)))
            model.zero_grad()
        (kept, expected), (again, gradients) = found
        assert torch.equal(kept + 0, again + 0), names
        for name, gradient in expected.items():
            assert torch.equal(gradient, gradients[name]), (names, name)


def check_recomputed_blocks_give_the_same_bits(rank: int, world: int, folder: Path) -> None:
    """Dropout draws the same numbers again, and what was sent once is not sent again."""
    if (group := world_of(2)) is None:
        return
    pairs = {key: [f"{key} kept", f"{key} again"] for key in PAIRS}
    plans = [_named(plan, name) for key, names in pairs.items() for plan, name in zip(PAIRS[key], names, strict=True)]
    model, batch = with_dropout("gpt2"), batch_of("gpt2", 6)
    hetu_fx.auto_parallelize(model, batch, plan=plans, process_group=group, seed=5)
    same_bits(model, batch, (4, 2), pairs)


def check_keys_and_values_go_round_once(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    model, batch = with_dropout("llama"), batch_of("llama", 5)
    plans = [_context("ring", 0, "kept"), _context("ring", 2, "again")]
    hetu_fx.auto_parallelize(model, batch, plan=plans, process_group=group)
    same_bits(model, batch, (3, 2), {"ring": ["kept", "again"]})


class Normed(nn.Module):
    """Replicas meet in the middle of its blocks, which update buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), target)


def check_replicas_that_meet_in_a_block_may_recompute_unlike(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    torch.manual_seed(3)
    model, batch = Normed().double(), batch_of("mlp", 8)
    kept = Plan((one(Stage((0,)), rows=3), one(Stage((1,)))), name="kept")
    again = Plan((one(Stage((0,), recompute=2), rows=3), one(Stage((1,)))), name="again")
    hetu_fx.auto_parallelize(model, batch, plan=[kept, again], process_group=group)
    same_bits(model, batch, (5, 3), {"DP": ["kept", "again"]})
    assert all(int(layer[1].num_batches_tracked) == 2 for layer in model.layers), "a run again is no new batch"


def check_recomputed_blocks_train_as_one_device(rank: int, world: int, folder: Path) -> None:
    """Tied weights; evaluation in between, and gradients that are kept back."""
    if (group := world_of(2)) is None:
        return
    stages = Stage((0,), blocks=1, recompute=1), Stage((1,), blocks=1, recompute=1)
    plans = [_named(Plan((one(*stages, micro_batches=2),)), "PP"), _named(PAIRS["TP"][1], "TP")]
    twins = Twins("gpt2", plans, group)
    for seed, name in enumerate(("PP", "TP", "PP")):
        twins.model.hetu.switch(name)
        batch = batch_of("gpt2", 5, seed=seed)
        with torch.no_grad():
            twins.model(**rows_of(batch, (3, 2)))
        with twins.model.no_sync():
            loss_of(twins.model(**rows_of(batch, (3, 2)))).backward()
        loss_of(twins.plain(**batch)).backward()
        twins.step(batch, (3, 2))


def _named(plan: Plan, name: str) -> Plan:
    return replace(plan, name=name)
