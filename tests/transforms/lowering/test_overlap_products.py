"""Which products are joined with the communication before or after them, and in how many slices they are made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from hetu_fx.check.verdict import judge
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.plans.overlap import parse_slices
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.transforms.lowering.overlap_products import Overlap
from hetu_fx.transforms.lowering.slice_counts import SUM, Slicing
from hetu_fx.transforms.show import op_name
from hetu_fx.transforms.specialize.device_graph import DeviceGraph
from tests.transforms.cases import Case
from tests.transforms.plans import deduced, device_graph, is_hetu, program_of

GROUP = Plan.tensor_parallel((0, 1), (2, 1))
SHARED = replace(GROUP, sequence_parallel=True)
AGAIN = Plan((Pipeline((Stage((0, 1), (2, 1), recompute=2),)),))
SLOW = Cluster.on_paper([1e7] * 2, nodes=("a", "b"), intra=Link(1e6), inter=Link(1e6))
NEAR = Cluster.on_paper([1e7] * 2, nodes=("a", "a"), intra=Link(1e6), inter=Link(1e6))


def joined(
    case: Case, plan: Plan, cluster: Cluster | None = None, rank: int = 0, *, on_host: bool = False
) -> DeviceGraph:
    whole = deduced(case.program, plan)
    made = Overlap(whole.annotated, cluster, on_host)(device_graph(case.program, plan, rank))
    made.graph.lint()
    return made


def names(device: DeviceGraph) -> list[str]:
    return [op_name(node).removeprefix("hetu.") for node in device.graph.nodes if is_hetu(node)]


def calls(device: DeviceGraph, name: str) -> list[fx.Node]:
    return [node for node in device.graph.nodes if is_hetu(node) and op_name(node) == f"hetu.{name}"]


def test_products_that_read_the_same_rows_are_one_op(llama: Case) -> None:
    found = calls(joined(llama, GROUP), "gathered_products")
    assert [len(node.args[1]) for node in found] == [3, 2] * 2 + [1]  # q, k and v; gate and up; the head
    assert "identity" not in names(joined(llama, GROUP))


def test_without_prices_sums_stay_by_themselves(llama: Case) -> None:
    made = names(joined(llama, GROUP))
    assert "summed_product" not in made
    assert made.count("all_reduce") == names(device_graph(llama.program, GROUP, 0)).count("all_reduce")


@pytest.mark.parametrize("plan", [GROUP, SHARED], ids=["sums", "parts"])
def test_sums_after_products_are_made_in_slices_where_that_pays(llama: Case, plan: Plan) -> None:
    made = joined(llama, plan, SLOW)
    assert len(calls(made, "summed_product")) == 2 * 2
    assert all(parse_slices(str(node.args[-1])).bounds for node in calls(made, "summed_product"))
    gathered = {node.args[-1] for node in calls(made, "gathered_products")}
    assert ("" in gathered) == (plan is GROUP)


def test_ranks_of_one_host_do_what_they_communicate_themselves(llama: Case) -> None:
    assert not calls(joined(llama, GROUP, NEAR), "summed_product")


@pytest.mark.parametrize(("plan", "count"), [(GROUP, 4), (SHARED, 0), (AGAIN, 0)], ids=["sums", "parts", "again"])
def test_on_hosts_products_are_made_where_they_are_summed(llama: Case, plan: Plan, count: int) -> None:
    made = calls(joined(llama, plan, NEAR, on_host=True), "summed_product")
    assert [node.args[-1] for node in made] == [""] * count


@pytest.mark.parametrize("plan", [GROUP, SHARED, AGAIN], ids=["sums", "parts", "computed again"])
def test_ranks_of_unequal_parts_join_alike(llama: Case, plan: Plan) -> None:
    first, second = (joined(llama, plan, SLOW, rank) for rank in (0, 1))
    assert names(first) == names(second)
    for name in ("summed_product", "gathered_products"):
        pairs = zip(calls(first, name), calls(second, name), strict=True)
        assert all(one.args[-1] == other.args[-1] for one, other in pairs)


def test_what_is_computed_again_stays_in_its_run(llama: Case) -> None:
    before, made = device_graph(llama.program, AGAIN, 0), joined(llama, AGAIN, SLOW)
    assert len(made.recomputed) == len(before.recomputed)
    order = {node: place for place, node in enumerate(made.graph.nodes)}
    for run in made.recomputed:
        places = [order[node] for node in run]
        assert places == list(range(places[0], places[0] + len(places)))
    again = {node for run in made.recomputed for node in run}
    assert again.issuperset(calls(made, "gathered_products")[:4])  # those of both blocks
    assert not calls(made, "summed_product")  # their products are in runs, and sums in none
    assert names(made).count("all_reduce") == names(before).count("all_reduce")


class Mixed(nn.Module):
    """Rows that a product reads, and something else besides."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        rows = x * self.scale
        return (rows * rows.sin() + self.out(self.inside(rows).relu())).sum()


def test_biases_come_along_and_those_that_another_rank_adds() -> None:
    program = program_of(Mixed().double(), (torch.ones(4, 6, dtype=torch.float64),))
    whole = deduced(program, GROUP)
    for rank in (0, 1):
        made = Overlap(whole.annotated, SLOW)(device_graph(program, GROUP, rank))
        (node,) = calls(made, "summed_product")
        bias = node.args[2]
        assert isinstance(bias, fx.Node)
        assert (bias.op == "placeholder") == (rank == 0)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(12), nn.Linear(12, 60), nn.Linear(60, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Headed(nn.Module):
    """Its head is split, so that cotangents of rows come as summands all the way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 12), nn.Linear(12, 64, bias=False)
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = self.embed(x)
        for block in self.blocks:
            rows = block(rows)
        return nn.functional.cross_entropy(self.head(rows).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("plan", [GROUP, AGAIN], ids=["kept", "computed again"])
def test_a_sum_whose_gradient_is_summed_is_one_op(plan: Plan) -> None:
    torch.manual_seed(0)
    model = Headed().double()
    batch = {"x": torch.randint(5, (3, 8)), "labels": torch.randint(64, (3, 8))}
    program = program_of(model, batch)
    before = device_graph(program, plan, 0)
    assert names(before).count("identity") == 2
    made = Overlap(deduced(program, plan).annotated)(before)
    made.graph.lint()
    assert "identity" not in names(made)
    assert [node.args[2] for node in calls(made, "all_reduce")] == ["partial", "partial", "duplicate"]
    made = Overlap(deduced(program, plan).annotated, on_host=True)(device_graph(program, plan, 0))
    made.graph.lint()
    assert "identity" not in names(made)
    cotangents = [node.args[4] for node in calls(made, "summed_product")]
    assert cotangents == (["partial", "partial"] if plan is GROUP else [])
    how = Lockstep()
    verdict = judge("plan", train_alone(model, [batch], how), how.train(model, [batch], plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict


def test_slices_are_those_of_the_slowest_share() -> None:
    slow = Slicing(SLOW.with_speeds({1: 1e6}), Stage((0, 1), (1, 1)))
    even = Slicing(SLOW, Stage((0, 1), (1, 1)))
    one, other = (of.beside(64, (0, 1), SUM, 100.0, 10.0) for of in (even, slow))
    assert other.product_seconds == pytest.approx(10 * one.product_seconds)
    assert one.product_seconds == pytest.approx(64 * 100 / 2 / 1e7)
    assert one.sent_seconds(0.5) == pytest.approx(one.sent_seconds(1.0) / 2)
