"""Checks of factors that ops look across, cut over devices: vocabularies, experts, heads; run by test_features.py."""

from __future__ import annotations

from pathlib import Path

from hetu_fx.plans.plan import Plan, Stage
from tests.end_to_end.twins import Twins, batch_of, one, rows_of, same_tensors, world_of

COUNTS = (2, 1, 3)
UNEQUAL = Plan((one(Stage((0, 1), (2, 1)), rows=2), one(Stage((2,)))))
BY_HEADS = Plan(
    (one(Stage((0, 1), (3, 1), context=2), rows=2, micro_batches=2), one(Stage((2,)))),
    attention="heads",
)
EXPERTS = Plan((one(Stage((0, 1, 2), (2, 2, 1)), micro_batches=2),), split=(("*.experts.*", 0),))


def check_scores_of_a_split_vocabulary_come_back_whole_when_asked_for(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(3)) is None:
        return
    for name in ("llama", "gpt2"):
        twins = Twins(name, UNEQUAL, group, outputs="all")
        batch = batch_of(name, sum(COUNTS))
        found = twins.model(**twins.mine(batch, COUNTS)).logits
        expected = rows_of({"logits": twins.plain(**batch).logits}, COUNTS)["logits"]
        same_tensors({"logits": found.detach()}, {"logits": expected.detach()}, twins.tolerance)


def check_experts_are_spread_unevenly_and_train_as_on_one_device(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(3)) is None:
        return
    twins = Twins("mixtral", EXPERTS, group)
    for seed, rows in enumerate((6, 5)):
        batch = batch_of("mixtral", rows, seed=seed)
        twins.step(batch, (rows - 3, 1, 2))
    experts = twins.model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape[0] == 5


def check_attention_by_heads_trains_as_on_one_device(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(3)) is None:
        return
    twins = Twins("llama", BY_HEADS, group)
    for seed, rows in enumerate((6, 5)):
        twins.step(batch_of("llama", rows, seed=seed), (rows - 3, 1, 2))
