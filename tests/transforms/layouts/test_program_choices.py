"""Stages with a program: what each op is cut on, what is refused, and one device's loss and gradients all the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import PlanError
from hetu_fx.graph.capture import capture
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.program_choices import op_names
from hetu_fx.transforms.layouts.states import SplitOn
from tests.planner.search.nets import Perceptron, mean_square
from tests.transforms.plans import deduced, program_of, same_in_group

BATCH = {"x": torch.randn(7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
TAIL = (OpRegion(":div", "whole"), OpRegion("*", "rows"))


@functools.cache
def model() -> Perceptron:
    torch.manual_seed(0)
    return Perceptron().double().train()  # type: ignore[no-any-return]


@functools.cache
def program() -> Program:
    return program_of(model(), BATCH, mean_square)


def plan(*regions: OpRegion, ratios: tuple[int, ...] = (3, 2, 1)) -> Plan:
    return Plan((Pipeline((Stage(tuple(range(len(ratios))), ratios, program=regions),)),))


ALL_ROWS = TAIL
PARTS_WITHIN = (OpRegion("second:linear", "second.weight:0"), OpRegion(":tanh", "second.weight:0"), *TAIL)
OWN_RATIOS = (OpRegion("third:*", "rows", (1, 1, 4)), *PARTS_WITHIN)
SUMMED = (OpRegion("second:linear", "first.weight:0"), OpRegion("first:linear", "first.weight:0"), *PARTS_WITHIN[1:])
WHOLE = (OpRegion("first:linear", "whole"), OpRegion(":relu", "whole"), *PARTS_WITHIN)


PARTS = tuple(OpRegion(op, "second.weight:0") for op in ("second:linear", ":tanh", "third:linear"))
FIRST = tuple(OpRegion(op, "first.weight:0") for op in ("first:linear", ":relu"))
REST = OpRegion("*", "whole")
CASES = {
    "rows": ALL_ROWS,
    "parts": (*PARTS, REST),
    "both": (*PARTS, *FIRST, REST),
    "rows and parts": PARTS_WITHIN,
    "ratios": OWN_RATIOS,
    "summed": SUMMED,
    "whole": WHOLE,
}


@pytest.mark.parametrize("regions", CASES.values(), ids=CASES.keys())
def test_programs_run_like_one_device(regions: tuple[OpRegion, ...]) -> None:
    same_in_group(program(), model(), plan(*regions), BATCH, limit=1e-10)


def test_each_op_runs_as_its_region_says() -> None:
    axis = deduced(program(), plan(*PARTS_WITHIN)).tensor_split
    cut = {node.name: decision.factor for node, decision in axis.decisions.items()}
    assert cut["linear"] is not None
    assert cut["linear"].is_batch
    assert cut["tanh"] is not None
    assert cut["tanh"].size == 64
    assert cut["linear_2"] == cut["linear"]
    weights = {leaf.name: axis.states[leaf.node] for leaf in program().factors.leaves}
    assert isinstance(weights["second.weight"], SplitOn)
    assert not isinstance(weights["first.weight"], SplitOn)


@pytest.mark.parametrize(
    ("regions", "said"),
    [
        (
            (OpRegion("secnd:linear", "rows"), *TAIL),
            r"program\[0\]: region 'secnd:linear' matches no op.*second:linear",
        ),
        ((OpRegion("second:*", "rows"),), r"says nothing of \d ops: first:linear, .*\nhint: give a region for each"),
        ((OpRegion("third:*", "first.weight:1"), *TAIL), r"cuts 'third:linear'.*has none of it\nhint: give one of"),
        ((OpRegion("third:*", "thrid.weight:0"), *TAIL), r"there is no such leaf.*third.weight"),
        ((OpRegion("third:*", "third.weight:5"), *TAIL), r"names no factor; the leaf's dims"),
        ((OpRegion(":tanh", "summands"), *TAIL), r"on summands, but none of its operands is a sum"),
    ],
)
def test_a_program_that_does_not_fit_is_refused_with_the_place_and_the_way_out(
    regions: tuple[OpRegion, ...], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        deduced(program(), plan(*regions))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(self.up(x)) * 2 * 3).sum()


def test_ops_are_named_by_module_and_numbered_where_they_come_again() -> None:
    graph = capture(Twice(), {"x": torch.randn(3, 4)}, loss_fn=lambda out, **batch: out)
    names = list(op_names(graph).values())
    assert len(set(names)) == len(names)
    assert {"up:linear", "up:linear#1", ":mul", ":mul#1", ":sum"} <= set(names)
