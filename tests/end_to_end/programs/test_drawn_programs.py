"""Programs that send factors, programs that are drawn and programs that a search found train what one device trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.kit.nets import Autoencoder, BertMoe
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.planner.count.graph_problem import graph_problem_of
from hetu_fx.planner.search.hap.adapter import hap_stage, is_expressible
from hetu_fx.planner.search.hap.search import search
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.end_to_end.cells import LOSS_FNS, Step, check_equal, make_batch, make_model
from tests.transforms.plans import program_of

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
ROWS = OpRegion("*", "rows")

pytestmark = pytest.mark.usefixtures("losses_in_double")


def plan_of(ratios: tuple[int, ...], *regions: OpRegion) -> Plan:
    """Give a plan of one stage that all devices of these ratios do together."""
    return Plan((Pipeline((Stage(tuple(range(len(ratios))), ratios, program=regions),)),))


def check(model: nn.Module, batches: list[dict[str, Any]], plan: Plan, loss_fn: Any = None) -> None:
    how = Lockstep(ADAMW, loss_fn=loss_fn)
    check_equal("program", train_alone(model, batches, how), how.train(model, batches, plan))


def cut(ops: str, split: str) -> OpRegion:
    return OpRegion(ops, split)


def from_factors(ops: str) -> OpRegion:
    return OpRegion(ops, "rows", factors=True)


@dataclass(frozen=True)
class Case:
    """A program of a model, on devices of these ratios; the second batch may have fewer rows than there are devices."""

    model: str
    ratios: tuple[int, ...]
    regions: tuple[OpRegion, ...]
    rows: tuple[int, ...] = field(default=(7, 2))


_HEADS = tuple(cut(f"*{name}_proj:linear", f"*{name}_proj.weight:0.0") for name in "qkv")

CASES = {
    "all of it on each device": Case("mlp", (2, 1), (cut("*", "whole"),)),
    "heads where they are projected, rows elsewhere": Case("llama", (3, 2, 1), (*_HEADS, ROWS)),
    "factors of a product": Case("mlp", (2, 1), (from_factors("first:linear"), ROWS)),
    "factors of products with biases": Case(
        "gpt2", (3, 2, 1), (from_factors("*attn*:addmm"), from_factors("*mlp*:addmm"), ROWS)
    ),
    "factors of all products and a table": Case(
        "llama", (3, 2, 1, 1), (from_factors("*:linear"), from_factors("*:embedding"), ROWS)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_trains_what_one_device_trains(name: str) -> None:
    case = CASES[name]
    batches = [make_batch(case.model, Step("", rows, 11), number) for number, rows in enumerate(case.rows)]
    check(make_model(case.model), batches, plan_of(case.ratios, *case.regions), LOSS_FNS.get(case.model))


def test_a_program_runs_in_micro_batches() -> None:
    factors = OpRegion("*mlp*:addmm", "rows", (1, 1, 2), factors=True)
    (whole,) = plan_of((3, 2, 1), factors, ROWS).pipelines
    plan = Plan((replace(whole, micro_batches=3),))
    check(make_model("gpt2"), [make_batch("gpt2", Step("", rows, 11), 0) for rows in (7, 3)], plan)


WAYS = ("rows", "first.weight:0", "first.weight:1", "second.weight:0", "third.weight:0", "whole")


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    ways=st.lists(st.sampled_from(WAYS), min_size=5, max_size=5),
    ratios=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    rows=st.integers(1, 6),
)
def test_a_drawn_program_trains_what_one_device_trains_or_is_refused(
    ways: list[str], ratios: list[int], rows: int
) -> None:
    ops = ("first:linear", ":relu", "second:linear", ":tanh", "third:linear")
    plan = plan_of(tuple(ratios), *map(cut, ops, ways), cut("*", "rows"))
    refused = None
    try:
        check(make_model("mlp"), [make_batch("mlp", Step("", rows, 1), 0)], plan, LOSS_FNS["mlp"])
    except PlanError as error:
        refused = str(error)
    assert refused is None or ("cuts '" in refused and "give one of" in refused)


@dataclass(frozen=True)
class Found:
    """A model, its batch and the devices that a program is searched for, and whether that sends factors."""

    make: Callable[[], nn.Module]
    batch: dict[str, torch.Tensor]
    speeds: tuple[float, ...]
    link: Link
    loss_fn: Any = None
    sends: bool = False


def experts() -> nn.Module:
    torch.manual_seed(3)
    model = BertMoe(64, 2, 5, 96)
    for name, parameter in model.named_parameters():
        if name.endswith((".up", ".down")):
            nn.init.normal_(parameter, std=0.02)
    return model


THREE, FOUR = (3e9, 2e9, 1e9), (2e10, 2e10, 1e10, 1e10)
TOKENS = {name: torch.arange(96).reshape(6, 16) % 89 for name in ("input_ids", "labels")}
FOUND = {
    "experts on three devices": Found(experts, TOKENS, THREE, Link(1e10, 1e-6)),
    "a decoder on four devices": Found(
        lambda: make_model("gpt2"), make_batch("gpt2", Step("", 8, 11), 0), FOUR, Link(1e9, 1e-6)
    ),
    "a decoder on slow links": Found(
        lambda: make_model("llama"), make_batch("llama", Step("", 6, 11), 0), THREE, Link(1e7, 1e-4), sends=True
    ),
    "a product between rows": Found(
        lambda: Autoencoder(8, 256),
        {"x": torch.linspace(-1, 1, 6 * 3 * 32 * 32, dtype=torch.float64).view(6, 3, 32, 32)},
        THREE,
        Link(1e6, 1e-5),
        sends=True,
    ),
    "few rows of wide layers": Found(
        lambda: make_model("mlp"), make_batch("mlp", Step("", 3, 1), 0), THREE, Link(1e9, 1e-7), LOSS_FNS["mlp"]
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_is_found_trains_what_one_device_trains(name: str) -> None:
    case = FOUND[name]
    model = case.make().double()
    problem = graph_problem_of(program_of(model, case.batch, case.loss_fn).analysed)
    stage = hap_stage(problem, search(is_expressible(problem), Cluster.on_paper(case.speeds, intra=case.link)))
    assert any(region.factors for region in stage.program) == case.sends
    check(model, [case.batch], Plan((Pipeline((stage,)),)), case.loss_fn)


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (OpRegion("forth:linear", "rows"), r"matches no op .did you mean 'first:linear'"),
        (
            OpRegion("first:linear", "second.weight:0"),
            r"'first:linear' on 'second.weight:0', but the op has none of it",
        ),
        (from_factors(":relu"), r"':relu' from factors, but aten.relu.default is none of aten.linear.default"),
        (OpRegion("first:linear", "first.weight:0", factors=True), r"which its weight has\nhint: cut it on its rows"),
    ],
)
def test_what_cannot_run_so_is_refused_by_name(region: OpRegion, message: str) -> None:
    batches = [make_batch("mlp", Step("", 4, 1), 0)]
    with pytest.raises(PlanError, match=message):
        check(make_model("mlp"), batches, plan_of((2, 1), region, ROWS), LOSS_FNS["mlp"])
