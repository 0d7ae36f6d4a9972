"""Variants that are made ready ahead, and what of the model that leaves as it was; one process."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import StateError
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching import graph_execution
from hetu_fx.switching.step import compiled_plans

TWO = Plan((Pipeline((Stage((0,)),), micro_batches=2),), name="two")


class Noisy(nn.Module):
    """Has all that a step could leave behind: gradients, running statistics, random numbers."""

    def __init__(self, normed: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4) if normed else nn.Identity()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = self.norm(nn.functional.dropout(self.linear(x), 0.5, self.training))
        return {"loss": made.square().mean(), "made": made}


def batch() -> dict[str, Tensor]:
    return {"x": torch.arange(24.0).reshape(8, 3)}


def built(model: Any) -> list[tuple[str, str]]:
    return [(event.event, event.variant) for event in model.hetu.stats["graphs"]]


def test_a_rehearsal_leaves_no_trace() -> None:
    model: Any = hetu_fx.auto_parallelize(Noisy(), batch(), plan=Plan.single(), seed=3)
    called: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(called.append)
    model(**batch())["loss"].backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    buffers, state = [buffer.clone() for buffer in model.buffers()], torch.random.get_rng_state()
    steps, hooks = model.hetu.stats["steps"], len(called)
    model.hetu.warm(batch())
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (model.hetu.stats["steps"], len(called)) == (steps, hooks)


def test_warm_builds_what_is_lacking_and_tells_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = hetu_fx.auto_parallelize(Noisy(normed=False), batch(), plan=replace(Plan.single(), name="one"))
    model.hetu.add_variant(TWO)
    with caplog.at_level(logging.INFO, "hetu_fx.variants"):
        model.hetu.warm(batch())
    told = [record.getMessage() for record in caplog.records if record.name == "hetu_fx.variants"]
    assert told == [f"variant {n} of 2, {name!r}, is made ready" for n, name in ((1, "one"), (2, "two"))]
    for name in ("two", "one"):
        model.hetu.switch(name)
        model(**batch())["loss"].backward()
    assert built(model) == [("built", "one"), ("built", "two")]
    assert model.hetu.stats["switch_cost"]["two"].built_seconds is None


def test_what_a_compiler_compiles_is_compiled_ahead_for_backward_too() -> None:
    compiled: list[object] = []

    def compiler(module: Any, examples: list[Any]) -> Any:
        compiled.append(module)
        return module.forward

    model: Any = hetu_fx.auto_parallelize(
        Noisy(False), batch(), plan=Plan.single(), compile=compiler, options=hetu_fx.Options(warm=True)
    )
    ahead = len(compiled)
    assert ahead >= 2, "forward and backward"
    model(**batch())["loss"].backward()
    assert len(compiled) == ahead


def test_a_model_without_a_loss_is_run_back_from_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[int, ...]] = []
    backward = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd,
        "backward",
        lambda tensors, *rest, **more: (ends.extend(tuple(t.shape) for t in tensors), backward(tensors, *rest, **more)),
    )
    model: Any = hetu_fx.auto_parallelize(
        nn.Linear(3, 2), {"input": torch.ones(4, 3)}, plan=Plan.single(), options=hetu_fx.Options(warm=True)
    )
    monkeypatch.undo()
    assert ends == [(4, 2)]
    assert all(parameter.grad is None for parameter in model.parameters())
    model(input=torch.ones(4, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Sequence(nn.Module):
    """Takes sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"loss": self.table(ids).square().mean()}


def test_a_variant_is_not_run_with_a_batch_that_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = graph_execution.rehearse
    monkeypatch.setattr(
        "hetu_fx.switching.graph_execution.rehearse",
        lambda variant, *rest: (ran.append(variant.name), run(variant, *rest)),
    )
    plans = [replace(Plan.single(), name="short", max_length=6), replace(TWO, name="any")]
    ids = {"ids": torch.zeros(4, 9, dtype=torch.int64)}
    model: Any = hetu_fx.auto_parallelize(Sequence(), ids, plan=plans, options=hetu_fx.Options(warm=True))
    assert (built(model), ran) == ([("built", "short"), ("built", "any")], ["any"])


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(StateError, match="idle_bytes is -1"):
        hetu_fx.auto_parallelize(Noisy(), batch(), plan=Plan.single(), options=hetu_fx.Options(idle_bytes=-1))


def test_what_another_process_has_deduced_is_not_deduced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = hetu_fx.auto_parallelize(Noisy(normed=False).eval(), batch(), plan=Plan.single())
    model.train(False)
    runtime = model.hetu._runtime
    variants = runtime.variants
    told = variants.deduced(TWO, variants.layouts())
    other = replace(Plan.single(), name="other")
    assert variants.deduced(other, variants.layouts()) is None, "a variant of the same layout has graphs"
    runtime.add_variant(TWO, "two", None, told)
    assert variants.deduced(TWO, variants.layouts()) is None
    monkeypatch.setattr(compiled_plans, "deduce_program", lambda *_, **__: pytest.fail("deduced again"))
    model.train()
    model.hetu.switch("two")
    model(**batch())["loss"].backward()
    assert built(model) == [("built", "two")]
