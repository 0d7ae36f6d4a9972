"""Checks of randomness, of several variants, and of plans made by the planner; run by test_features.py."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.plans.plan import Plan, Stage
from hetu_fx.switching.adapt.health import Probe
from hetu_fx.switching.step.timer import ComputeTimer
from tests.end_to_end.cells import DTYPES, MODELS, make_model
from tests.end_to_end.twins import Twins, batch_of, dp, gradients_of, loss_of, one, rows_of, same_tensors, world_of

DROPPING = (
    Plan((one(Stage((0,))),), name="1"),
    Plan(dp(3, 1).pipelines, name="DP"),
    Plan((one(Stage((0, 1), (2, 1))),), name="TP"),
    Plan((one(Stage((0,)), Stage((1,)), micro_batches=3),), name="PP"),
)


def with_dropout(name: str) -> nn.Module:
    """Make a model with its default dropout."""
    torch.manual_seed(17)
    return MODELS[name].model().to(DTYPES.get(name, torch.float64)).train()


def check_dropout_does_not_depend_on_the_plan(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    for name in ("gpt2", "bert"):
        model, batch, found = with_dropout(name), batch_of(name, 6), {}
        hetu_fx.auto_parallelize(model, batch, plan=DROPPING, process_group=group, seed=5)
        for plan in DROPPING:
            model.hetu.switch(plan.name)
            model.hetu._runtime.step = 0  # the same steps again
            losses = [loss_of(model(**rows_of(batch, (4, 2)))) for _ in range(2)]
            sum(losses).backward()
            found[plan.name] = [float(loss) for loss in losses], gradients_of(model)
            model.zero_grad()
        expected, gradients = found["1"]
        assert abs(expected[0] - expected[1]) > 1e-4, "two steps draw the same masks"
        for losses, others in found.values():
            assert losses == pytest.approx(expected, rel=1e-6)
            same_tensors(others, gradients, 2e-6)


def check_variants_alternate_by_length(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    short = Plan((one(Stage((0, 1), (2, 1))),), name="short", max_length=8)
    long = Plan((one(Stage((0,)), Stage((1,)), micro_batches=2),), name="long")
    twins = Twins("gpt2", [short, long], group)
    parameters = list(twins.model.parameters())
    places: list[int] = []
    for number, length in enumerate((7, 12, 8, 9, 6)):
        twins.step(batch_of("gpt2", 5, length, number), (3, 2))
        assert twins.model.hetu.current == ("short" if length <= 8 else "long")
        now = memory_of(twins)
        assert places in ([], now)
        places = now
    assert all(a is b for a, b in zip(parameters, twins.model.parameters(), strict=True))
    assert twins.model.hetu.stats["switches"] == 4


def check_the_groups_of_a_variant_are_created_when_it_is_first_used(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(3)) is None:
        return
    pair = Plan((one(Stage((0, 1))), one(Stage((2,)))), name="pair")
    other = Plan((one(Stage((0,))), one(Stage((1, 2)))), name="other")
    twins = Twins("mlp", [pair, other], group)
    hetu, batch = twins.model.hetu, batch_of("mlp", 6)
    assert hetu.stats["groups"] == ()
    told: list[str] = []
    hetu.on_communication(lambda what, start, end: told.append(what))
    seen = []
    for name in ("pair", "other", "pair", "other"):
        hetu.switch(name)
        twins.step(batch, (2, 2, 2))
        seen.append({group.ranks for group in hetu.stats["groups"]})
    assert seen[1] == seen[2] == seen[3], "a variant that has run needs no new groups"
    first = {name: {group.ranks for group in use.groups} for name, use in hetu.stats["first_use"].items()}
    assert ((0, 1) in first["pair"]) is (rank < 2)
    assert first["pair"] == seen[0]
    assert not first["pair"] & first["other"]
    assert first["pair"] | first["other"] == seen[-1]
    assert told.count("group creation") == len(hetu.stats["groups"]) == len(seen[-1])
    assert all(rank in ranks for ranks in seen[-1]), "a group that this rank is not in"
    assert all(group.seconds > 0 for group in hetu.stats["groups"])
    assert all(use.graph_seconds > 0 for use in hetu.stats["first_use"].values())
    assert f"{len(first['other'])} process groups" in hetu.explain()
    hetu.switch(hetu.add_variant(Plan.single(), "alone"))
    twins.step(batch, (2, 2, 2))
    assert "left out: 2 of 3 devices, 1, 2" in hetu.explain().splitlines()


def memory_of(twins: Twins) -> list[int]:
    """Give where the pieces of all parameters and of their optimizer state lie."""
    optimizer = twins.optimizers[1]
    states = [v for p in twins.model.parameters() for v in optimizer.state[p].values() if hasattr(v, "to_local")]
    assert states
    return [tensor.to_local().data_ptr() for tensor in (*twins.model.parameters(), *states)]


def check_a_planned_model_trains(rank: int, world: int, folder: Path) -> None:
    """Nothing is given: devices are measured, and ranks bring examples of unequal numbers of rows."""
    for size in (2, 4):
        if (group := world_of(size)) is None:
            continue
        twins = Twins("gpt2", "auto", group)
        counts = (4, 2, 1, 1)[:size]
        for seed in range(2):
            twins.step(batch_of("gpt2", sum(counts), seed=seed), counts)
        assert twins.model.hetu.plan.predicted is not None
        assert "plan" in twins.model.hetu.explain()


def check_ranks_plan_alike_from_unlike_examples(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    cluster = Cluster.on_paper([4e9, 1e9])
    model = make_model("gpt2")
    example = rows_of(batch_of("gpt2", 60), (57, 3))
    hetu_fx.auto_parallelize(model, example, plan="auto", cluster=cluster, process_group=group)
    plans = everyone(model.hetu.plan.to_json(), group)
    assert plans[0] == plans[1]


def everyone(value: Any, group: Any) -> list[Any]:
    """Gather a value of all ranks."""
    found = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, value, group=group)
    return found


def unequal(folder: Path, *speeds: float) -> Path:
    """Write a cluster file."""
    path = folder / f"cluster_{'_'.join(map(str, speeds))}.json"
    if torch.distributed.get_rank() == 0:
        Cluster.on_paper([speed * 1e6 for speed in speeds]).write(path)
    torch.distributed.barrier(world_of(len(speeds)))
    return path


def check_unequal_devices_get_unequal_work(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", "auto", group, cluster=unequal(folder, 3, 1), example=batch_of("mlp", 200))
    twins.step(batch_of("mlp", 8), (5, 3))
    assert twins.model.hetu.stats["rows"] == (6, 2)


def check_a_given_rate_leads_to_a_new_plan(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", "auto", group, cluster=unequal(folder, 1, 1), example=batch_of("mlp", 200))
    twins.step(batch_of("mlp", 12), (6, 6))
    assert twins.model.hetu.stats["rows"] == (6, 6)
    name = twins.model.hetu.replan({0: 2.0})
    for seed in range(1, 3):
        twins.step(batch_of("mlp", 12, seed=seed), (6, 6))
    assert twins.model.hetu.current == name
    assert twins.model.hetu.stats["rows"] == (4, 8)
    twins.model.hetu.replan({0: 1.0})
    twins.step(batch_of("mlp", 12, seed=3), (6, 6))
    assert twins.model.hetu.stats["rows"] == (6, 6)


def check_training_goes_on_until_the_plan_for_a_slow_device_is_made(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", "auto", group, cluster=unequal(folder, 1, 1), example=batch_of("mlp", 200))
    hetu, go = twins.model.hetu, folder / "go"
    planning = hetu._adaptation.replanning
    planner = planning.planner
    planning.end()  # its process has the planner as it was
    planning.planner = lambda cluster, name: planner(cluster, name) if is_there(go) else None
    seconds, rate = [0.0], 1.0

    def step() -> tuple[int, ...]:
        rows = hetu.stats["rows"] or (7, 7)
        seconds[0] = rows[rank] * (rate if rank == 1 else 1.0)
        twins.step(batch_of("mlp", 14, seed=hetu.stats["steps"]), (7, 7))
        return hetu.stats["rows"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeTimer, "seconds", property(lambda _: seconds[0], lambda *_: None), raising=False)
        assert [step() for _ in range(8)] == [(7, 7)] * 8
        rate = 2.5
        while not hetu.is_planning:
            assert step() == (7, 7)
        assert hetu.health == {0: 1.0, 1: 2.5}
        assert [step() for _ in range(4)] == [(7, 7)] * 4
        torch.distributed.barrier(group)
        go.touch()
        while hetu.is_planning:
            rows = step()
    assert rows == (10, 4)
    (change,) = hetu.stats["replanned"]
    assert change.step >= change.asked + 4
    assert len(set(everyone((str(hetu.plan), change.step, change.asked), group))) == 1


def check_a_device_that_was_left_out_gets_work_again_when_it_has_recovered(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", "auto", group, cluster=unequal(folder, 1, 1), example=batch_of("mlp", 200))
    hetu, seconds, rate = twins.model.hetu, [0.0], [1.0]

    def train(rates: dict[int, float]) -> None:
        rate[0], steps = rates[rank], hetu.stats["steps"]
        while hetu.health != rates or hetu.is_planning:
            rows = hetu.stats["rows"] or (7, 7)
            seconds[0] = (rows[rank] if rank < len(rows) else 0) * rate[0]
            twins.step(batch_of("mlp", 14, seed=hetu.stats["steps"]), (7, 7))
            assert hetu.stats["steps"] < steps + 500, hetu.health

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeTimer, "seconds", property(lambda _: seconds[0], lambda *_: None), raising=False)
        patch.setattr(Probe, "seconds", lambda _, budget: rate[0])
        train({0: 1.0, 1: 1.0})
        for _ in range(8):
            twins.step(batch_of("mlp", 14), (7, 7))
        train({0: 1.0, 1: 50.0})
        assert hetu.plan.devices == (0,)
        train({0: 1.0, 1: 1.0})
        assert hetu.stats["rows"] == (7, 7)
    assert [change.planning_seconds > 0 for change in hetu.stats["replanned"]] == [True, False]


def is_there(path: Path) -> bool:
    """Wait for a file."""
    while not path.exists():
        time.sleep(0.001)
    return True


def check_a_planner_that_fails_stops_no_rank(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(2)) is None:
        return
    twins = Twins("mlp", "auto", group, cluster=unequal(folder, 1, 1))
    adaptation, before = twins.model.hetu._adaptation, list(twins.model.hetu.variants)
    adaptation.cluster = Cluster.on_paper([1e6, 1e6], memory_bytes=1)
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr(logging.getLogger("hetu_fx.health"), "warning", lambda text, *values: told.append(text % values))
        adaptation.adapt({1: 2.5})
        while twins.model.hetu.is_planning:
            twins.step(batch_of("mlp", 12), (6, 6))
    assert "no plan for 'slow-1x2.5', training goes on" in told[0]
    assert "no plan fits the memory of devices 0, 1" in told[0]
    assert list(twins.model.hetu.variants) == before
