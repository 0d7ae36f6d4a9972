"""What changes of state cost, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.comm_ops.plans.cost import all_reduce_cost, ring_cost
from hetu_fx.deduction.factors.factors import FactorClass
from hetu_fx.transforms.layouts.beam import WIDTH, beam
from hetu_fx.transforms.layouts.reshard_cost import TYPICAL_LINKS, Prices, bytes_of
from hetu_fx.transforms.layouts.states import SUMMED, WHOLE, AxisState, SplitOn
from tests.transforms.plans import program_of

RANKS = (0, 1, 2)
COLUMNS = SplitOn(FactorClass(0, 6, is_batch=False))
TURN = ring_cost(4800.0, RANKS, TYPICAL_LINKS)
BOTH = all_reduce_cost(4800.0, RANKS, TYPICAL_LINKS)


@pytest.mark.parametrize(
    ("state", "wanted", "summed", "seconds"),
    [
        (WHOLE, WHOLE, False, 0.0),
        (WHOLE, WHOLE, True, BOTH),  # back: the cotangents are summed
        (SUMMED, WHOLE, False, BOTH),  # back: nothing
        (SUMMED, COLUMNS, False, TURN + TURN),  # back: the cotangent is gathered
        (COLUMNS, WHOLE, False, TURN),  # back: it is cut
        (COLUMNS, WHOLE, True, TURN + TURN),  # back: it is summed in parts
        (WHOLE, COLUMNS, False, TURN),  # forth: nothing; back: it is gathered
    ],
)
def test_a_change_costs_what_its_calls_do_forth_and_back(
    state: AxisState, wanted: AxisState, summed: bool, seconds: float
) -> None:
    graph = program_of(nn.Linear(30, 40), (torch.randn(4, 30),)).graph
    weight = next(leaf.node for leaf in graph.leaves if leaf.name == "weight")
    prices = Prices((RANKS,), dict(zip(graph.graph.nodes, bytes_of(graph), strict=True)))
    assert prices.change(weight, state, wanted, summed=summed, trained=True) == pytest.approx(seconds)
    assert prices.change(weight, state, wanted, summed=summed, trained=False) <= seconds


class Step:
    def __init__(self, seconds: float, departures: int, future: object) -> None:
        self.seconds, self.departures, self.future = seconds, departures, future


def test_of_ways_with_one_future_the_cheapest_stays_then_the_one_that_departs_least() -> None:
    kept = beam([Step(2.0, 0, "a"), Step(1.0, 3, "a"), Step(1.0 + 1e-15, 1, "a"), Step(5.0, 0, "b")])
    assert [(round(way.seconds, 9), way.departures, way.future) for way in kept] == [(1.0, 1, "a"), (5.0, 0, "b")]


def test_no_more_than_a_few_ways_are_kept_the_cheapest() -> None:
    kept = beam([Step(float(cost), 0, cost) for cost in range(50, 0, -1)])
    assert [way.future for way in kept] == list(range(1, WIDTH + 1))
