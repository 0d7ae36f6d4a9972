"""A selection of torch's ops under plans; and what is planted is found. `python -m tests.ops` tries all ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hetu_fx.deduction.rules.build import keep_dims
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.registry import register_rule, unregister_rule
from hetu_fx.deduction.rules.rule import Factoring
from tests.ops.cell import PLANS, Apart, Case, Finding, findings, try_case, worst
from tests.ops.database import OpCall
from tests.ops.model import HOLDINGS, Embedding, embedded
from tests.ops.report import bars, page, results_of, rows, summary
from tests.ops.trial import Kind

CHOSEN = "cumsum einsum linalg.inv std topk".split()


@pytest.mark.parametrize("name", CHOSEN)
def test_an_op_of_torchs_database_trains_as_on_one_device(name: str) -> None:
    found = findings(name, 0, 1)
    assert not isinstance(found, Apart)
    assert [one for one in found if one.kind is not Kind.RIGHT] == []


def test_ops_that_plain_torch_cannot_train_with_are_told_apart() -> None:
    assert findings("nn.functional.one_hot", 0, 1) is Apart.NOT_CAPTURABLE
    assert findings("equal", 0, 1) is Apart.NOT_DIFFERENTIABLE


@torch.library.custom_op("planted::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    """Subtract what the first dim has on average."""
    return x - x.mean(0)


@centred.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(0)


centred.register_autograd(_backward)
CENTRED = torch.ops.planted.centred.default


@contextmanager
def rule(says: str | Callable[[Call], Factoring]) -> Iterator[None]:
    register_rule(CENTRED, says)
    try:
        yield
    finally:
        unregister_rule(CENTRED)


def found_of_planted(embedding: Embedding, width: int) -> list[Finding]:
    """Try the planted op; another width in each test, as equal models are captured once in a process of tests."""
    torch.manual_seed(0)
    made = embedded(CENTRED, OpCall((torch.randn(6, width, dtype=torch.float64),), {}), embedding, HOLDINGS[0])
    assert made is not None
    found = try_case(Case("planted", *made))
    assert not isinstance(found, Apart)
    return found


def test_a_wrong_rule_over_rows_is_found_where_rows_are_split() -> None:
    with rule(lambda call: keep_dims(call)):
        found = found_of_planted(Embedding.OWN_ROWS, 3)
    kinds = {plan: worst(found, plan) for plan in PLANS}
    assert {plan: one.kind for plan, one in kinds.items() if one} == {
        "data": Kind.WRONG,
        "tensor": Kind.RIGHT,
        "mixed": Kind.WRONG,
    }
    assert "gradient of" in kinds["data"].why


def test_a_wrong_rule_over_other_dims_is_found_where_a_group_splits_them() -> None:
    with rule(lambda call: keep_dims(call)):
        found = found_of_planted(Embedding.WEIGHTS, 4)
    assert worst(found, "tensor").kind is Kind.WRONG
    assert worst(found, "data").kind is Kind.RIGHT


def test_the_right_rule_is_right() -> None:
    with rule(lambda call: keep_dims(call, [0])):
        found = found_of_planted(Embedding.OWN_ROWS, 5)
    assert {one.kind for one in found if one.plan == "tensor"} == {Kind.RIGHT}
    assert Kind.WRONG not in {one.kind for one in found}


def test_a_foreign_error_of_a_rule_is_a_crash() -> None:
    with rule(lambda call: keep_dims(call, [call.rank + 7])):
        found = found_of_planted(Embedding.OWN_ROWS, 7)
    assert {one.kind for one in found} == {Kind.CRASH}
    assert all(one.why.startswith("IndexError") for one in found)


def test_the_table_has_the_worst_of_each_plan() -> None:
    found = [
        Finding("data", "a", Kind.RIGHT),
        Finding("data", "b", Kind.REFUSED, "PlanError: no"),
        *(Finding(plan, "a", Kind.RIGHT) for plan in ("tensor", "mixed")),
    ]
    results = {"sum": found, "nonzero": Apart.NOT_CAPTURABLE}
    assert "| `sum` | refused | right | right |" in page(results)
    assert "1 ops not tried: torch.export does not capture it" in summary(results)
    assert [row.get("cells", {}).get("data") for row in rows(results)] == ["refused", None]
    assert page(results_of(rows(results))) == page(results)
    holds = {bar["name"]: bar["holds"] for bar in bars(results)}
    assert holds == {"share of right cells": False, "crash": True, "wrong": True, "refused without a word": True}
