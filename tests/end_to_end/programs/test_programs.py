"""Programs as all of their ranks run them, in one process: loss, gradients and parameters are those of one device."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase as fnmatch
from functools import partial

import pytest
import torch
from torch import nn

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.flow import is_item
from hetu_fx.transforms.layouts.program_choices import op_names
from tests.end_to_end.cells import LOSS_FNS, Mlp, mlp_batch
from tests.model_zoo import NO_DROPOUT, SAMPLES, to_double
from tests.transforms.plans import program_of

HOW = Lockstep(partial(torch.optim.AdamW, lr=1e-2), loss_fn=LOSS_FNS["mlp"])
TAIL = (OpRegion(":div", "whole"), OpRegion("*", "rows"))
ROWS = TAIL
OWN_RATIOS = (OpRegion("first:*", "rows", (1, 4, 1)), *TAIL)
NO_PART = (OpRegion("first:*", "rows", (2, 0, 1)), *TAIL)
PARTS = (
    OpRegion("first:linear", "first.weight:0", (1, 0, 5)),
    OpRegion(":relu", "first.weight:0", (5, 2, 1)),
    OpRegion("second:linear", "second.weight:0"),
    *TAIL,
)
SUMS = (
    OpRegion("first:linear", "first.weight:0", (1, 2, 5)),
    OpRegion(":relu", "first.weight:0", (1, 2, 5)),
    OpRegion("second:linear", "first.weight:0", (1, 2, 5)),
    OpRegion(":tanh", "rows", (1, 0, 1)),
    *TAIL,
)


def plan(regions: tuple[OpRegion, ...], ratios: tuple[int, ...] = (3, 2, 1)) -> Plan:
    return Plan((Pipeline((Stage(tuple(range(len(ratios))), ratios, program=regions),)),))


# A bias before a batch norm has no gradient but rounding, which is told relative to a millionth of the largest one.
TOLERANCES = {"conv": 1e-9}


def check_equal(
    model: nn.Module, given: list[dict[str, torch.Tensor]], how: Lockstep, of: Plan, tolerance: float = 1e-10
) -> None:
    verdict = judge("plan", train_alone(model, given, how), how.train(model, given, of), tolerance, "")
    assert verdict.verdict == "equal", verdict


@pytest.mark.parametrize(
    "regions",
    [ROWS, OWN_RATIOS, NO_PART, PARTS, SUMS],
    ids=["rows", "rows by other ratios", "a device without a part", "parts of other ratios", "sums in parts"],
)
def test_a_program_trains_as_one_device(regions: tuple[OpRegion, ...]) -> None:
    torch.manual_seed(3)
    check_equal(Mlp().double(), [mlp_batch(7, 0), mlp_batch(2, 0)], HOW, plan(regions))


@pytest.mark.parametrize("ratios", [(2, 1), (1, 3, 2, 1)])
def test_rows_are_cut_by_the_ratios_of_two_and_of_four_devices(ratios: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    check_equal(Mlp().double(), [mlp_batch(9, 0)], HOW, plan(ROWS, ratios))


def rows_elsewhere(analysed: AnalysedGraph, *first: OpRegion) -> Iterator[OpRegion]:
    """Yield these regions, then one for each other op: cut on rows where it has them, else whole."""
    yield from first
    factors, flow = analysed.factors, analysed.flow
    for node, name in op_names(analysed.graph).items():
        is_free = not factors.is_op(node) or not flow.is_mixed(node) or is_item(node)
        if not is_free and not any(fnmatch(name, region.ops) for region in first):
            op = factors.op(node)
            has_rows = any(c.is_batch and c not in op.with_cut(c).whole for c in op.classes)
            yield OpRegion(name, "rows" if has_rows else "whole")


FEED_FORWARD = "transformer.h.*.mlp.c_fc.weight:1"
BY_SHARE = (1, 4, 2)
CASES = {
    "gpt2 on rows": ("gpt2", ()),
    "gpt2, feed-forward in parts": (
        "gpt2",
        (
            OpRegion("transformer.h.*.mlp.c_fc:addmm", FEED_FORWARD, BY_SHARE),
            OpRegion("transformer.h.*.mlp.act:*", FEED_FORWARD, BY_SHARE),
            OpRegion("transformer.h.*.mlp.c_proj:addmm", FEED_FORWARD, BY_SHARE),
        ),
    ),
    "llama on rows": ("llama", ()),
    "llama, feed-forward in parts": (
        "llama",
        (OpRegion("model.layers.*.mlp*:*", "model.layers.*.mlp.gate_proj.weight:0", BY_SHARE),),
    ),
    "llama, vocabulary in parts": ("llama", (OpRegion("lm_head:linear", "lm_head.weight:0", BY_SHARE),)),
    "convolutions on rows": ("conv", ()),
    "convolutions, channels of one in parts": ("conv", (OpRegion("body.0:*", "body.0.weight:0", BY_SHARE),)),
}


@pytest.mark.usefixtures("losses_in_double")
@pytest.mark.parametrize(("name", "first"), CASES.values(), ids=CASES.keys())
def test_models_run_rows_in_some_regions_and_parts_in_others(name: str, first: tuple[OpRegion, ...]) -> None:
    torch.manual_seed(5)
    model = SAMPLES[name].model(**NO_DROPOUT.get(name, {})) if name != "conv" else SAMPLES[name].model()
    given = [to_double(SAMPLES[name].batch(rows, length)) for rows, length in ((7, 13), (5, 9))]
    regions = tuple(rows_elsewhere(program_of(model.double(), given[0]).analysed, *first))
    check_equal(model, given, Lockstep(partial(torch.optim.SGD, lr=0.1)), plan(regions), TOLERANCES.get(name, 1e-10))


class Experts(nn.Module):
    """Feed-forward experts of which each row takes all, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(5, 10, 14)), nn.Parameter(torch.randn(5, 14, 10))
        self.router = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        hidden = torch.relu(torch.einsum("bsk,eko->ebso", x, self.up))
        return torch.einsum("ebsk,bse->bsk", torch.einsum("ebso,eok->ebsk", hidden, self.down), weights)


def test_experts_are_cut_where_the_rest_is_rows() -> None:
    torch.manual_seed(5)
    model, batch = Experts().double(), {"x": torch.randn(7, 6, 10, dtype=torch.float64)}
    how = Lockstep(partial(torch.optim.SGD, lr=0.1), loss_fn=lambda out, x: out.pow(2).mean())
    experts = (
        OpRegion(":einsum", "up:0", (2, 1, 2)),
        OpRegion(":relu", "up:0", (2, 1, 2)),
        OpRegion(":einsum#1", "up:0"),
    )
    regions = tuple(rows_elsewhere(program_of(model, batch, how.loss_fn).analysed, *experts))
    check_equal(model, [batch], how, plan(regions))
