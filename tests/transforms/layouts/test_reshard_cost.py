"""What changes of state cost, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.plans.cost import Topology, all_reduce_cost, ring_cost
from hetu_fx.deduction.factors.factors import FactorClass
from hetu_fx.transforms.layouts.forward_search import WIDTH, beam
from hetu_fx.transforms.layouts.reshard_cost import (
    FLOPS_PER_SECOND,
    TYPICAL_LINKS,
    Prices,
    node_bytes,
    products_by_byte,
)
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
    prices = Prices((RANKS,), dict(zip(graph.graph.nodes, node_bytes(graph), strict=True)))
    assert prices.change(weight, state, wanted, summed=summed, trained=True) == pytest.approx(seconds)
    assert prices.change(weight, state, wanted, summed=summed, trained=False) <= seconds


class Rows(nn.Module):
    """Rows that two products read, and rows that something else reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(30, 40), nn.Linear(30, 20), nn.Linear(20, 30, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        others = self.third(x)
        rows = others.relu()
        return self.first(rows), self.second(rows), self.first(others)


def test_what_products_hide_of_a_sum_is_told_by_their_work_where_nothing_else_reads_the_rows() -> None:
    program = program_of(Rows(), (torch.randn(4, 20),))
    found = products_by_byte(program.graph, program.factors, program.flow)
    assert {node.name: by_byte for node, by_byte in found.items()} == {"relu": 2 * 30 * (40 + 20) / (30 * 4)}


def hidden(topology: Topology, by_byte: float, state: AxisState = WHOLE) -> float:
    node = torch.fx.Graph().placeholder("rows")
    return Prices((RANKS,), {node: 4800.0}, topology, beside={node: by_byte}).hidden(node, state, WHOLE)


def test_products_hide_no_more_than_the_sum_and_on_hosts_that_ranks_come_late() -> None:
    flops = 3e-6 * len(RANKS) * FLOPS_PER_SECOND
    assert hidden(TYPICAL_LINKS, flops / 4800) == pytest.approx(3e-6)
    assert hidden(TYPICAL_LINKS, 1e12) == pytest.approx(BOTH)
    assert hidden(TYPICAL_LINKS, 1e12, COLUMNS) == pytest.approx(TURN)
    assert hidden(TYPICAL_LINKS, 0.0) == 0.0
    link = Link(1e8, 1e-4)
    hosts = Cluster.on_paper([1e9] * 3, intra=link, meeting_seconds=[1e-5] * 3)
    assert hidden(hosts, 1e12) == pytest.approx(2 * hosts.meeting_seconds(RANKS))
    chips = Cluster.on_paper([1e9, 2e9, 2e9], kinds=["A100"] * 3, intra=link)
    assert hidden(chips, 3e-5 * len(RANKS) * 1e9 / 4800) == pytest.approx(3e-5)


class Step:
    def __init__(self, seconds: float, departures: int, future: object) -> None:
        self.seconds, self.departures, self.future = seconds, departures, future


def test_of_ways_with_one_future_the_cheapest_stays_then_the_one_that_departs_least() -> None:
    kept = beam([Step(2.0, 0, "a"), Step(1.0, 3, "a"), Step(1.0 + 1e-15, 1, "a"), Step(5.0, 0, "b")])
    assert [(round(way.seconds, 9), way.departures, way.future) for way in kept] == [(1.0, 1, "a"), (5.0, 0, "b")]


def test_no_more_than_a_few_ways_are_kept_the_cheapest() -> None:
    kept = beam([Step(float(cost), 0, cost) for cost in range(50, 0, -1)])
    assert [way.future for way in kept] == list(range(1, WIDTH + 1))
