"""Stages with a dtype compute in it what torch.autocast does: against one device whose parts are under autocast."""

from __future__ import annotations

import copy
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
from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.transforms.specialize.casts import check_computes
from tests import model_zoo
from tests.kinds.testkind import NAME, on_testkind

LOW = "bfloat16"
ROWS, LENGTH, WIDTH, WORDS = 4, 12, 32, 40


class Block(nn.Module):
    """Attention and a feed-forward part, each beside the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fused, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.fused(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        met = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(met.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Chain(nn.Module):
    """Blocks between an embedding and a loss; parts named in `low`, "first" and "last" besides, are under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(4))
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


def made() -> Chain:
    torch.manual_seed(0)
    return Chain()


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    drawn = (torch.randint(WORDS, (ROWS, LENGTH + 1)) for _ in range(2))
    return [{"ids": one[:, :-1], "labels": one[:, 1:].contiguous()} for one in drawn]


def alone(*low: Any) -> Trained:
    model = made()
    model.low = frozenset(low)
    return train_alone(model, batches(), Lockstep())


def numbers(trained: Trained) -> Tensor:
    gradients = [step.gradients[name].flatten() for step in trained.steps for name in sorted(step.gradients)]
    return torch.cat([torch.tensor([step.loss for step in trained.steps]), *gradients])


def distance(one: Trained, other: Trained) -> float:
    return float((numbers(one) - numbers(other)).norm() / numbers(other).norm())


EVERYTHING = (0, 1, 2, 3, "last")
FIRST, SECOND = Stage((0,), blocks=2), Stage((1,), blocks=2)
ONE = Plan.single().pipelines[0].stages[0]

PLANS: dict[str, tuple[Plan, Sequence[Any]]] = {
    "one device": (Plan((Pipeline((replace(ONE, dtype=LOW),)),)), EVERYTHING),
    "first stage": (Plan((Pipeline((replace(FIRST, dtype=LOW), SECOND)),)), (0, 1)),
    "last stage": (Plan((Pipeline((FIRST, replace(SECOND, dtype=LOW))),)), (2, 3, "last")),
    "micro-batches": (Plan((Pipeline((FIRST, replace(SECOND, dtype=LOW)), micro_batches=2),)), (2, 3, "last")),
    "recomputed": (Plan((Pipeline((replace(FIRST, dtype=LOW, recompute=2), SECOND)),)), (0, 1)),
    "zero bubble": (
        Plan((Pipeline((replace(FIRST, dtype=LOW), SECOND), micro_batches=2),), schedule="zero-bubble"),
        (0, 1),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_stage_with_a_dtype_computes_as_one_device_does_under_autocast(name: str) -> None:
    """What is left is the order in which rows are summed: far less than what autocast changes."""
    plan, low = PLANS[name]
    found, expected, exact = Lockstep().train(made(), batches(), plan), alone(*low), alone()
    assert distance(expected, exact) > 3e-4
    assert distance(found, expected) < 0.1 * distance(expected, exact)
    assert {gradient.dtype for step in found.steps for gradient in step.gradients.values()} == {torch.float32}


def test_replicas_of_unlike_dtypes_sum_gradients_of_their_own_rows() -> None:
    plan = Plan((Pipeline((replace(ONE, dtype=LOW),), share=3), Pipeline((replace(ONE, devices=(1,)),))))
    found = Lockstep().train(made(), batches()[:1], plan)
    low, exact = (train_alone(model, rows, Lockstep()) for model, rows in zip(*halves(), strict=True))
    weights = {"low": 0.75, "exact": 0.25}
    for name, gradient in found.steps[0].gradients.items():
        pairs = weights["low"] * low.steps[0].gradients[name], weights["exact"] * exact.steps[0].gradients[name]
        assert torch.allclose(gradient, sum(pairs), rtol=2e-3, atol=1e-5), name


def halves() -> tuple[list[Chain], list[list[dict[str, Tensor]]]]:
    """Return the model of each replica, and its rows."""
    low, exact = made(), made()
    low.low = frozenset(EVERYTHING)
    (batch, _), cuts = batches(), (slice(0, 3), slice(3, 4))
    return [low, exact], [[{name: tensor[cut] for name, tensor in batch.items()}] for cut in cuts]


@pytest.mark.parametrize("stage", [Stage((0, 1), dtype=LOW), Stage((0, 1), (2, 2), context=2, dtype=LOW)])
def test_devices_of_a_group_cast_alike(stage: Stage) -> None:
    """What they sum is rounded, as on one device under autocast what is summed whole is rounded once."""
    found, expected, exact = (
        Lockstep().train(made(), batches(), Plan((Pipeline((stage,)),))),
        alone(*EVERYTHING),
        alone(),
    )
    assert 1e-6 < distance(found, expected) < 2 * distance(expected, exact)


@pytest.mark.parametrize("stages", [(Stage((0, 1), dtype=LOW),), (replace(FIRST, dtype=LOW), SECOND)])
@on_testkind
def test_devices_of_unlike_types_cast_alike(stages: tuple[Stage, ...]) -> None:
    plan = Plan((Pipeline(stages),))
    found, expected = (
        Lockstep(devices=devices).train(made(), batches(), plan) for devices in ([f"{NAME}:0", "cpu"], None)
    )
    assert distance(found, expected) < 1e-6


def test_regions_in_which_a_model_turns_autocast_off_stay_as_they_are() -> None:
    """A Llama works out its rotary tables so."""
    model, (batch,) = model_zoo.llama().float(), [model_zoo.example("llama")]
    plain = Lockstep(seed=1)

    class Cast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **batch: Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(**batch)

    batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    found = plain.train(model, [batch], PLANS["one device"][0])
    expected = train_alone(Cast(copy.deepcopy(model)), [batch], plain)
    exact = train_alone(model, [batch], plain)
    changed = abs(expected.steps[0].loss - exact.steps[0].loss)
    assert changed > 0
    assert abs(found.steps[0].loss - expected.steps[0].loss) < 0.1 * changed


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
    with pytest.raises(PlanError, match="dtype 'bfloat'; give 'bfloat16'"):
        Plan.from_json(written)
