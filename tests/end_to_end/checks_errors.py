"""Checks of what is refused, on every rank and without a hang; of the object that comes back; of compilation."""

from __future__ import annotations

import copy
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hetu_fx
from hetu_fx.errors import BatchError, EnvironmentProblem, HetuFxError, PlanError, StateError
from hetu_fx.plans.plan import Plan, Stage
from tests.end_to_end.cells import Mlp, make_model, squared_error
from tests.end_to_end.twins import Twins, batch_of, dp, one, rows_of, world_of

TP = Plan((one(Stage((0, 1), (2, 1))),), name="TP")


def refused(error: type[HetuFxError], words: str, group: Any, **options: Any) -> None:
    """Check that auto_parallelize raises on this rank, and leaves the model as it was."""
    model = options.pop("model", None) or Mlp().double()
    batch = options.pop("batch", None) or batch_of("mlp", 4)
    options = {"plan": dp(1, 1), "loss_fn": squared_error, **options}
    with pytest.raises(error, match=f"(?s){words}"):  # a hint has a line of its own
        hetu_fx.auto_parallelize(model, batch, process_group=group, **options)
    assert not hasattr(model, "hetu")
    assert not any(hasattr(parameter, "home_layout") for parameter in model.parameters())


def plan_file(folder: Path, **changes: Any) -> Path:
    """Write a plan file with changes; rank 0 writes."""
    path = folder / "plan.json"
    dist.barrier(world_of(2))
    if dist.get_rank() == 0:
        path.write_text(json.dumps({**dp(3, 1).to_json(), **changes}))
    dist.barrier(world_of(2))
    return path


def check_plans_that_cannot_be(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    path = folder / "broken.json"
    path.write_text('{"format": ')
    refused(PlanError, "broken.json is not valid JSON", group, plan=path)
    refused(PlanError, "unknown key 'shedule'.*did you mean 'schedule'", group, plan=plan_file(folder, shedule="1f1b"))
    refused(PlanError, "format is 'hetu_fx.plan/9'", group, plan=str(plan_file(folder, format="hetu_fx.plan/9")))
    refused(PlanError, r"another world.*\[2\].*only 2", group, plan=dp(1, 1, 1))
    refused(PlanError, "'automatic'.*'auto'", group, plan="automatic")
    refused(PlanError, "list of Plans", group, plan=[])
    refused(EnvironmentProblem, "'indictor'.*'inductor'", group, compile="indictor")
    refused(BatchError, "'shared'.*'per_rank'", group, data="shared")


def check_plans_that_do_not_fit_the_model(rank: int, world: int, folder: Path) -> None:
    model, batch = make_model("llama"), batch_of("llama", 4)
    heads = Plan.tensor_parallel((0, 1, 2, 3))
    refused(PlanError, "3 parts over 4 devices", world_of(4), model=model, batch=batch, plan=heads, loss_fn=None)
    if (group := world_of(2)) is None:
        return
    blocks = Plan((one(Stage((0,), blocks=2), Stage((1,), blocks=1)),))
    refused(PlanError, r"\[2, 1\].*add up to 3.*has 2", group, model=model, batch=batch, plan=blocks, loss_fn=None)
    again = Plan((one(Stage((0,)), Stage((1,), recompute=2)),))
    refused(PlanError, "recomputes 2 blocks, but holds 1", group, model=model, batch=batch, plan=again, loss_fn=None)
    refused(PlanError, "recomputes 2 blocks, but holds 0", group, plan=again)


def check_models_that_cannot_be(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    refused(StateError, "meta.*give weights=", group, model=copy.deepcopy(Mlp()).to("meta"))
    refused(StateError, "no parameters", group, model=torch.nn.ReLU())
    # On one rank only: it has its own error, the other is told.
    model = torch.nn.ReLU() if rank else Mlp().double()
    refused(StateError, "no parameters" if rank else "rank 1: StateError", group, model=model)
    model = Mlp().double()
    hetu_fx.auto_parallelize(model, batch_of("mlp", 4), plan=dp(1, 1), process_group=group)
    with pytest.raises(StateError, match="add_variant"):
        hetu_fx.auto_parallelize(model, batch_of("mlp", 4), plan=dp(1, 1), process_group=group)


def check_groups_of_other_ranks(rank: int, world: int, folder: Path) -> None:
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        refused(EnvironmentProblem, r"process_group has ranks \[1, 2\], but it must be the first", group)


def check_examples_that_disagree(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    batch = batch_of("mlp", 4)
    other = batch if rank else {"x": batch["x"]}
    refused(BatchError, "keys, dtypes", group, batch=other, loss_fn=None)


def check_batches_that_disagree(rank: int, world: int, folder: Path) -> None:
    """Every rank raises, and the next step runs."""
    if (group := world_of(2)) is None:
        return
    twins = Twins("llama", dp(3, 1), group)
    batch = batch_of("llama", 4)
    mine = rows_of(batch, (2, 2))
    deeper = {**mine, "input_ids": mine["input_ids"][None]}
    others = {
        "keys": {"input_ids": mine["input_ids"]},
        "dtypes": {**mine, "labels": mine["labels"].int()},
        "rank 1|.": deeper,
        "rank 1|lebels": {**mine, "lebels": mine["labels"]},
        "rank 1|numbers of rows": {**mine, "labels": mine["labels"][:1]},
    }
    for words, other in others.items():
        with pytest.raises(HetuFxError, match=words):
            twins.model(**(other if rank else mine))
    with pytest.raises(BatchError, match="no rows"):
        twins.model(**rows_of(batch, (0, 0)))
    twins.step(batch, (1, 3))


def check_shared_batches_must_be_the_same(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", dp(3, 1), group, data="global")
    with pytest.raises(BatchError, match=r"(?s)same batch on every rank.*hint: .*per_rank"):
        twins.model(**batch_of("mlp", 4 + rank))
    with pytest.raises(StateError, match=r"no variant 'fast'\nhint: .*variant0"):
        twins.model.hetu.switch("fast")
    with pytest.raises(StateError, match=r"(?s)not measured.*hint: .*cluster="):
        twins.model.hetu.replan({0: 2.0})
    twins.step(batch_of("mlp", 4))


def check_the_model_stays_what_it_is(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    model = make_model("gpt2")
    kind, signature = type(model), inspect.signature(model.forward)
    names = [name for name, _ in model.named_parameters()]
    keys, parameters = list(model.state_dict()), list(model.parameters())
    same = hetu_fx.auto_parallelize(model, batch_of("gpt2", 4), plan=dp(1, 1), process_group=group)
    assert same is model
    assert type(model) is kind
    assert inspect.signature(model.forward) == signature
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert all(
        a is b and isinstance(b, torch.nn.Parameter) for a, b in zip(parameters, model.parameters(), strict=True)
    )
    assert model.lm_head.weight is model.transformer.wte.weight


def check_compiled_graphs_train_the_same(rank: int, world: int, folder: Path) -> None:
    """Sizes change between steps, down to one row; evaluation comes in between."""
    if (group := world_of(2)) is None:
        return
    plans, shallow = [TP, Plan(dp(3, 1).pipelines, name="DP")], partial(make_model, n_layer=2)
    twins = Twins("gpt2", plans, group, compile="aot_eager", make=shallow)
    for number, (name, rows, length) in enumerate([("TP", 1, 9), ("TP", 4, 11), ("DP", 7, 8)]):
        twins.model.hetu.switch(name)
        batch = batch_of("gpt2", rows, length, number)
        with torch.no_grad():
            twins.model(**rows_of(batch, (rows - 1, 1)))
        twins.step(batch, (1, rows - 1))
