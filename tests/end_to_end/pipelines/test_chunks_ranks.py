"""Stages in chunks on two gloo ranks, with what else scripts do: evaluate, accumulate, save and load, compile."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hetu_fx import prepare
from hetu_fx.errors import ExportError
from hetu_fx.export.load import load_exported
from hetu_fx.plans.plan import Plan, Stage
from tests.end_to_end.cells import make_model
from tests.end_to_end.twins import Twins, batch_of, loss_of, one, rows_of, same_tensors, wholes

CHUNKS = Plan((one(Stage((0,)), Stage((1,)), micro_batches=4),), schedule="interleaved", name="chunks")
WAITING = replace(CHUNKS, schedule="zero-bubble", name="waiting")
WHOLE = Plan((one(Stage((0, 1), (2, 1))),), name="whole")
deep = partial(make_model, n_layer=5)
COUNTS = (4, 2)


def check_an_evaluation_gives_each_rank_its_rows(rank: int, world: int, folder: Path) -> None:
    twins = Twins("gpt2", CHUNKS, None, make=deep)
    batch = batch_of("gpt2", 6)
    with torch.no_grad():
        found, expected = twins.model.eval()(**rows_of(batch, COUNTS)), twins.plain.eval()(**batch)
    same_tensors({"logits": found.logits}, rows_of({"logits": expected.logits}, COUNTS), twins.tolerance)


def check_steps_are_accumulated_and_plans_change(rank: int, world: int, folder: Path) -> None:
    twins = Twins("gpt2", [CHUNKS, WHOLE, WAITING], None, make=deep)
    for seed, name in enumerate(("chunks", "whole", "waiting", "chunks")):
        twins.model.hetu.switch(name)
        first, second = batch_of("gpt2", 6, seed=seed), batch_of("gpt2", 5, seed=9)
        with twins.model.no_sync():
            loss_of(twins.model(**rows_of(first, COUNTS))).backward()
        loss_of(twins.plain(**first)).backward()
        twins.step(second, (2, 3))


def check_a_checkpoint_goes_on_under_another_plan(rank: int, world: int, folder: Path) -> None:
    twins = Twins("gpt2", CHUNKS, None, make=deep)
    twins.step(batch_of("gpt2", 6), COUNTS)
    twins.model.hetu.save(folder / "chunks", optimizer=twins.optimizers[1])
    other = Twins("gpt2", WHOLE, None, make=deep)
    other.model.hetu.load(folder / "chunks", optimizer=other.optimizers[1])
    same_tensors(wholes(other.model), wholes(twins.model), 0.0)
    other.plain, other.optimizers[0] = twins.plain, torch.optim.AdamW(twins.plain.parameters(), lr=0.0)
    other.gradients(batch_of("gpt2", 6, seed=1), COUNTS)


def check_hand_overs_by_messages_of_gloo(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "open_mail", lambda table: None)
        pipelines = (one(Stage((1,)), Stage((0,)), micro_batches=7),)
        turned = [replace(plan, pipelines=pipelines) for plan in (CHUNKS, WAITING)]
        twins = Twins("gpt2", turned, None, make=deep)
        assert twins.model.hetu._runtime.table.mail is None
        for seed, plan in enumerate((*turned, *turned)):
            twins.model.hetu.switch(plan.name)
            twins.step(batch_of("gpt2", 8, seed=seed), (5, 3))


def check_compiled_chunks_train_as_one_device(rank: int, world: int, folder: Path) -> None:
    twins = Twins("gpt2", [CHUNKS, WAITING], None, make=deep, compile="aot_eager")
    for seed, name in enumerate(("chunks", "waiting", "chunks", "waiting")):
        twins.model.hetu.switch(name)
        twins.step(batch_of("gpt2", 6, seed=seed), COUNTS)


def check_exported_chunks_hand_on_to_each_other(rank: int, world: int, folder: Path) -> None:
    twins, batch = Twins("gpt2", [CHUNKS, WAITING], None, make=deep), batch_of("gpt2", 4)
    twins.model(**rows_of(batch, (2, 2)))
    twins.model.hetu.export(folder / "export")
    count = (batch["labels"][:, 1:] != -100).sum()
    for name in ("chunks", "waiting"):
        values = {**batch, "count_0": count}
        for part in range(4):
            graph = load_exported(folder / "export", name, part % 2, part // 2)
            values |= graph(**{name: values[name] for name in graph.needs})
        torch.testing.assert_close(values["loss"], loss_of(twins.plain(**batch)))
    with pytest.raises(ExportError, match="no graph of variant 'chunks' for rank 0, chunk 2"):
        load_exported(folder / "export", "chunks", 0, 2)


CHECKS = [name for name in globals() if name.startswith("check_")]


@pytest.mark.distributed
@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, 2, 600)[name] if report]
    assert not failures, "\n".join(failures)
