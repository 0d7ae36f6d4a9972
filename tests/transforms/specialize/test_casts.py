"""Stages with a dtype compute in it what torch.autocast does: against one device whose parts are under autocast."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.base.device_types import CPU, DeviceType
from hetu_fx.errors import PlanError
from hetu_fx.lockstep import SGD, Lockstep, Step, Trained
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.transforms.specialize.casts import check_computes
from tests import model_zoo
from tests.kinds.testkind import NAME, on_testkind

LOW = "bfloat16"
ROWS, LENGTH, WIDTH, WORDS = 4, 12, 32, 40


class Block(nn.Module):
    """Attention and a feed-forward part, each beside the residual."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.norm, self.fused, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.fused(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        met = F.scaled_dot_product_attention(query, key, value, is_causal=True) if self.attends else query * key + value
        x = x + self.out(met.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Chain(nn.Module):
    """Blocks between an embedding and a loss; those in `low`, and the head if "last" is in it, are under autocast."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(attends=attends) for _ in range(4))
        self.head, self.low = nn.Linear(WIDTH, WORDS), frozenset[Any]()

    def part(self, name: Any) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if name in self.low else nullcontext()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            with self.part(number):
                x = block(x)
        with self.part("last"):
            return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def made(*, attends: bool = True) -> Chain:
    torch.manual_seed(0)
    return Chain(attends=attends)


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    drawn = (torch.randint(WORDS, (ROWS, LENGTH + 1)) for _ in range(2))
    return [{"ids": one[:, :-1], "labels": one[:, 1:].contiguous()} for one in drawn]


def alone(*parts: tuple[int, Sequence[Any]], attends: bool = True) -> Trained:
    """Train on one device, so many rows at a time, with these parts of the model under autocast."""
    model, steps = made(attends=attends), []
    optimizer = SGD(model.parameters())
    for batch in batches():
        first, total = 0, 0.0
        for rows, low in parts:
            model.low = frozenset(low)
            loss = model(**{name: tensor[first : first + rows] for name, tensor in batch.items()})["loss"] * rows / ROWS
            loss.backward()
            first, total = first + rows, total + float(loss.detach())
        steps.append(Step(total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
        optimizer.step()
        optimizer.zero_grad()
    assert first == ROWS
    return Trained(steps, {})


def numbers(trained: Trained) -> Tensor:
    gradients = [step.gradients[name].flatten() for step in trained.steps for name in sorted(step.gradients)]
    return torch.cat([torch.tensor([step.loss for step in trained.steps]), *gradients])


def distance(one: Trained, other: Trained) -> float:
    return float((numbers(one) - numbers(other)).norm() / numbers(other).norm())


EVERYTHING = (0, 1, 2, 3, "last")
FIRST, SECOND = Stage((0,), blocks=2), Stage((1,), blocks=2)
ONE = Plan.single().pipelines[0].stages[0]

Parts = tuple[tuple[int, Sequence[Any]], ...]
PLANS: dict[str, tuple[Plan, Parts]] = {
    "one device": (Plan((Pipeline((replace(ONE, dtype=LOW),)),)), ((4, EVERYTHING),)),
    "first stage": (Plan((Pipeline((replace(FIRST, dtype=LOW), SECOND)),)), ((4, (0, 1)),)),
    "last stage": (Plan((Pipeline((FIRST, replace(SECOND, dtype=LOW))),)), ((4, (2, 3, "last")),)),
    "micro-batches": (
        Plan((Pipeline((FIRST, replace(SECOND, dtype=LOW)), micro_batches=2),)),
        ((2, (2, 3, "last")),) * 2,
    ),
    "recomputed": (Plan((Pipeline((replace(FIRST, dtype=LOW, recompute=2), SECOND)),)), ((4, (0, 1)),)),
    "zero bubble": (
        Plan((Pipeline((replace(FIRST, dtype=LOW), SECOND), micro_batches=2),), schedule="zero-bubble"),
        ((2, (0, 1)),) * 2,
    ),
    "replicas of unlike dtypes": (
        Plan((Pipeline((replace(ONE, dtype=LOW),), share=3), Pipeline((replace(ONE, devices=(1,)),)))),
        ((3, EVERYTHING), (1, ())),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_stage_with_a_dtype_computes_as_one_device_does_under_autocast(name: str) -> None:
    """What is left is where a loss is divided by its rows: far less than what autocast changes."""
    plan, parts = PLANS[name]
    found, expected, exact = Lockstep().train(made(), batches(), plan), alone(*parts), alone((4, ()))
    assert distance(expected, exact) > 3e-4
    assert distance(found, expected) < 0.1 * distance(expected, exact)
    assert {gradient.dtype for step in found.steps for gradient in step.gradients.values()} == {torch.float32}


@pytest.mark.parametrize("stage", [Stage((0, 1), dtype=LOW), Stage((0, 1), (2, 2), context=2, dtype=LOW)])
def test_devices_of_a_group_cast_alike(stage: Stage) -> None:
    """What they sum is rounded, as on one device under autocast what is summed whole is rounded once."""
    plan = Plan((Pipeline((stage,)),))
    found, expected, exact = Lockstep().train(made(), batches(), plan), alone((4, EVERYTHING)), alone((4, ()))
    assert 1e-6 < distance(found, expected) < 2 * distance(expected, exact)


@pytest.mark.parametrize("stages", [(Stage((0, 1), dtype=LOW),), (replace(FIRST, dtype=LOW), SECOND)])
@on_testkind
def test_devices_of_unlike_types_cast_alike(stages: tuple[Stage, ...]) -> None:
    """Without attention, for which the types have unlike kernels."""
    plan, model = Plan((Pipeline(stages),)), made(attends=False)
    found, expected = (
        Lockstep(devices=devices).train(model, batches(), plan) for devices in ([f"{NAME}:0", "cpu"], None)
    )
    assert distance(found, expected) < 1e-6


def test_regions_in_which_a_model_turns_autocast_off_stay_as_they_are() -> None:
    """A Llama works out its rotary tables so."""
    model, plain = model_zoo.llama().float(), Lockstep(seed=1)
    batch = model_zoo.causal_batch(4, LENGTH)
    found = plain.train(model, [batch], PLANS["one device"][0]).steps[0].loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = float(model(**batch).loss)
    changed = abs(expected - float(model(**batch).loss))
    assert changed > 0
    assert abs(found - expected) < 0.1 * changed


class Normed(nn.Module):
    """A model whose replicas sum in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.two(self.norm(self.one(x))), labels)}


def test_unlike_dtypes_are_refused_where_replicas_sum_in_the_middle() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8), "labels": torch.randint(4, (8,))}
    for dtypes, is_refused in (((LOW, None), True), ((LOW, LOW), False)):
        stages = (replace(ONE, devices=(rank,), dtype=dtype) for rank, dtype in enumerate(dtypes))
        plan = Plan(tuple(Pipeline((stage,)) for stage in stages))
        with (
            pytest.raises(PlanError, match="replicas of this model sum in the middle") if is_refused else nullcontext()
        ):
            Lockstep().train(Normed(), [batch], plan)


def test_a_dtype_that_a_type_of_devices_does_not_compute_in_is_refused() -> None:
    none = DeviceType(name="none", count=lambda: 0, chip=str, no_dtypes={torch.bfloat16})
    with pytest.raises(PlanError, match="rank 3 has dtype 'bfloat16', in which devices of type 'none' do not compute"):
        check_computes(none, LOW, 3)
    check_computes(none, None, 3)
    check_computes(CPU, LOW, 3)


def test_a_plan_file_keeps_the_dtype_of_its_stages() -> None:
    plan = PLANS["last stage"][0]
    written = plan.to_json()
    assert [stage.get("dtype") for stage in written["pipelines"][0]["stages"]] == [None, LOW]
    assert Plan.from_json(written) == plan
    assert "x2 bfloat16" in plan.summary()
    written["pipelines"][0]["stages"][1]["dtype"] = "bfloat"
    with pytest.raises(PlanError, match="dtype 'bfloat'\nhint: give 'bfloat16'"):
        Plan.from_json(written)
