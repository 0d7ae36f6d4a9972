"""Checks of what a step does with rows, losses and outputs; run on four ranks by test_features.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import StateError
from hetu_fx.plans.plan import Plan, Stage
from hetu_fx.switching.bridge.bridge import Bridge
from hetu_fx.switching.step.gradients import Collector
from tests.end_to_end.cells import Mlp, make_model, squared_error
from tests.end_to_end.twins import Twins, batch_of, dp, gradients_of, loss_of, one, rows_of, same_tensors, world_of

UNEVEN = {
    "DP": Plan(dp(3, 1).pipelines, name="DP"),
    "TP": Plan((one(Stage((0, 1), (2, 1))),), name="TP"),
    "PP": Plan((one(Stage((0,)), Stage((1,)), micro_batches=2),), name="PP"),
}
ALL = tuple(UNEVEN.values())


def check_a_replica_without_rows_trains(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", dp(50, 1), group)
    for seed in range(3):
        twins.step(batch_of("mlp", 3, seed=seed), (1, 2))
    assert twins.model.hetu.stats["rows"] == (3, 0)


def check_a_rank_outside_the_plan_takes_part(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(3)) is None:
        return
    for plan in (dp(2, 1), UNEVEN["PP"]):
        twins = Twins("mlp", plan, group)
        for seed in range(2):
            twins.step(batch_of("mlp", 7, seed=seed), (2, 2, 3))


def check_a_rank_may_bring_no_rows(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", ALL, group)
    for name in UNEVEN:
        twins.model.hetu.switch(name)
        twins.step(batch_of("mlp", 4), (4, 0))
        twins.step(batch_of("mlp", 4, seed=1), (0, 4))


def check_accumulated_steps_equal_one_batch(rank: int, world: int, folder: Path) -> None:
    """Two micro-steps of half the loss each equal the whole batch, as under DDP; gradients travel once."""
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", ALL, group)
    for name in UNEVEN:
        twins.model.hetu.switch(name)
        for seed in range(2):
            _accumulate(twins, batch_of("mlp", 8, seed=seed))


def _accumulate(twins: Twins, batch: dict[str, Tensor]) -> None:
    halves = [rows_of(batch, (4, 4), part) for part in (0, 1)]
    squared_error(twins.plain(**batch), **batch).backward()
    with counted_reductions() as reductions:
        with twins.model.no_sync():
            (loss_of(twins.model(**rows_of(halves[0], (3, 1)))) / 2).backward()
        assert reductions == []
        (loss_of(twins.model(**rows_of(halves[1], (2, 2)))) / 2).backward()
        assert reductions
    twins.same_gradients()
    twins.update()


def check_gradients_follow_the_average_of_what_comes_in(rank: int, world: int, folder: Path) -> None:
    """Ranks may scale the one loss each by their own factor, and by another one in every step."""
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", ALL, group)
    for name in UNEVEN:
        twins.model.hetu.switch(name)
        for seed, factors in enumerate([(3.0, 1.0), (0.5, 0.25), (0.0, 0.0), (0.0, 8.0)]):
            first, second = (batch_of("mlp", 5, seed=2 * seed + part) for part in (0, 1))
            mean = sum(factors) / 2
            squared_error(twins.plain(**first), **first).backward()
            (squared_error(twins.plain(**second), **second) * mean).backward()
            with twins.model.no_sync():
                loss_of(twins.model(**rows_of(first, (3, 2)))).backward()
            (loss_of(twins.model(**rows_of(second, (1, 4)))) * factors[rank]).backward()
            twins.same_gradients()
            twins.update()


@contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """Note every bucket of gradients that starts on its way home."""
    started: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        original = Bridge.reduce_start
        patch.setattr(Bridge, "reduce_start", lambda *args: [started.append(args[1]), original(*args)][1])
        yield started


def check_a_switch_keeps_accumulated_gradients(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", UNEVEN["DP"], group)
    twins.model.hetu.add_variant(UNEVEN["PP"])
    for seed, names in enumerate([("DP", "PP"), ("PP", "DP")]):
        batch = batch_of("mlp", 8, seed=seed)
        squared_error(twins.plain(**batch), **batch).backward()
        twins.model.hetu.switch(names[0])
        with twins.model.no_sync():
            (loss_of(twins.model(**rows_of(rows_of(batch, (4, 4), 0), (3, 1)))) / 2).backward()
        twins.model.hetu.switch(names[1])
        (loss_of(twins.model(**rows_of(rows_of(batch, (4, 4), 1), (3, 1)))) / 2).backward()
        twins.same_gradients()
        twins.update()
    # Nothing is left over that a later switch would bring: gradients stay None until the next backward.
    twins.model.hetu.switch("PP")
    with torch.no_grad():
        twins.model(**rows_of(batch, (5, 3)))
    assert all(parameter.grad is None for parameter in twins.model.parameters())


PIPES = Plan((one(Stage((0,)), Stage((1,)), rows=2, micro_batches=2), one(Stage((2,)), micro_batches=2)), name="pipes")


def check_a_loss_that_is_dropped_leaves_no_message_behind(rank: int, world: int, folder: Path) -> None:
    """A pipeline runs backward, and sends gradients, before anybody knows whether they are wanted."""
    if (group := world_of(3)) is None:
        return
    twins = Twins("mlp", (PIPES, dp(2, 1, 1)), group)
    twins.model.hetu.switch("pipes")
    batches = [batch_of("mlp", 9, seed=seed) for seed in range(3)]
    for batch in batches:
        twins.model(**rows_of(batch, (4, 4, 1)))
        twins.model(**rows_of(batch, (9, 0, 0)))
        twins.step(batch, (3, 3, 3))
    twins.model(**rows_of(batches[0], (3, 3, 3)))
    twins.model.hetu.switch(next(name for name in twins.model.hetu.variants if name != "pipes"))
    twins.step(batches[1], (3, 3, 3))


def check_gradients_travel_while_a_pipeline_still_runs(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(3)) is None:
        return
    before_the_end: list[int] = []
    with pytest.MonkeyPatch.context() as patch, counted_reductions() as started:
        ran = Collector.ran
        patch.setattr(Collector, "ran", lambda self: [before_the_end.append(len(started)), ran(self)][1])
        Twins("mlp", PIPES, group).step(batch_of("mlp", 9), (3, 3, 3))
    assert len(before_the_end) == 1
    assert rank == 0 or before_the_end[0] > 0, "the first stage's gradients are the last; no other rank's are"


class Shared(nn.Module):
    """Parameters whose gradients are one tensor: what is written in place must not be written twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(10, dtype=torch.float64)) for _ in range(2))
        self.scale = nn.Parameter(torch.randn((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.scale + (self.first + self.second)) ** 2).mean()


def check_gradients_that_are_one_tensor_stay_apart(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    torch.manual_seed(3)
    plain = Shared()
    model, x = copy.deepcopy(plain), torch.randn(8, 10, dtype=torch.float64)
    hetu_fx.auto_parallelize(model, {"x": x}, plan=dp(1, 1), process_group=group)
    plain(x).backward()
    with model.no_sync():
        (model(x[2 * rank : 2 * rank + 2]) / 2).backward()
    (model(x[4 + 2 * rank : 6 + 2 * rank]) / 2).backward()
    same_tensors(gradients_of(model), gradients_of(plain), 1e-10)


def check_evaluation_gives_each_rank_its_rows(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    batch, counts = batch_of("llama", 5), (2, 3)
    twins = Twins("llama", ALL, group)
    for name in UNEVEN:
        twins.model.hetu.switch(name)
        twins.model.eval(), twins.plain.eval()
        with torch.no_grad():
            expected = twins.plain(**batch)
            found = twins.model(**rows_of(batch, counts))
            bare = twins.model(input_ids=rows_of(batch, counts)["input_ids"])
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
        own = rows_of({"logits": expected.logits}, counts)["logits"]
        torch.testing.assert_close(found.logits, own, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(bare.logits, own, rtol=1e-9, atol=1e-9)
        assert bare.loss is None
    # Only now: a step's loss is in float32, so that parameters are no longer equal to the last bit afterwards.
    twins.model.train(), twins.plain.train()
    for name in UNEVEN:
        twins.model.hetu.switch(name)
        twins.step(batch_of("llama", 6, seed=1), (3, 3))


def check_evaluation_of_a_shared_batch_gives_all_rows(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(3)) is None:
        return
    batch = batch_of("mlp", 5)
    twins = Twins("mlp", (*ALL, Plan(dp(1, 2, 1).pipelines, name="DP3")), group, data="global")
    for name in (*UNEVEN, "DP3"):
        twins.model.hetu.switch(name)
        twins.model.eval()
        with torch.no_grad():
            found, expected = twins.model(**batch), twins.plain(**batch)
            bare = twins.model(x=batch["x"])
        torch.testing.assert_close(found.loss, squared_error(expected, **batch))
        torch.testing.assert_close(found.output, expected)
        torch.testing.assert_close(bare, expected)
        twins.model.train()
        twins.step(batch)


def check_a_loss_outside_is_the_mean_over_ranks(rank: int, world: int, folder: Path) -> None:
    """As under DDP: every rank has the loss of its own rows, and their mean is trained on."""
    if (group := world_of(2)) is None:
        return
    for plan in (UNEVEN["DP"], UNEVEN["TP"]):
        plain, model = make_model("mlp"), make_model("mlp")
        hetu_fx.auto_parallelize(model, batch_of("mlp", 4), plan=plan, process_group=group)
        batch = batch_of("mlp", 7, seed=4)
        parts = [rows_of(batch, (5, 2), r) for r in range(2)]
        losses = [squared_error(plain(**part), **part) for part in parts]
        (sum(losses) / 2).backward()
        loss = squared_error(model(**parts[rank]), **parts[rank])
        loss.backward()
        torch.testing.assert_close(loss, losses[rank])
        same_tensors(gradients_of(model), gradients_of(plain), 1e-10)


def check_a_pipeline_without_a_loss_points_to_loss_fn(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    model = Mlp()
    batch = {"x": torch.randn(4, 10)}
    hetu_fx.auto_parallelize(model, batch, plan=UNEVEN["PP"], process_group=group)
    with pytest.raises(StateError, match="loss_fn"):
        model(**batch)


def check_a_given_count_follows_trainers_arithmetic(rank: int, world: int, folder: Path) -> None:
    """The program divides by a given count: the loss is the world-size-th part, which Trainer multiplies again."""
    if (group := world_of(2)) is None:
        return
    batch = batch_of("llama", 5)
    count = (batch["labels"][:, 1:] != -100).sum()
    twins = Twins("llama", ALL, group)
    for name in UNEVEN:
        twins.model.hetu.switch(name)
        expected = twins.plain(**batch, num_items_in_batch=count).loss
        loss = twins.model(**rows_of(batch, (2, 3)), num_items_in_batch=count).loss
        torch.testing.assert_close(loss * 2, expected, rtol=1e-5, atol=0)
        expected.backward()
        (loss * 2).backward()
        twins.same_gradients()
        twins.update()
