"""Costs of captured programs, against torch's own FLOP counter and sizes worked out by hand."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.graph.bind import input_tensors
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph
from hetu_fx.planner.count import count
from hetu_fx.planner.count.count import FlopCounter, example_rows, program_costs, value_bytes
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import make_program
from hetu_fx.transforms.layouts.work_shares import WorkShares
from tests.model_zoo import LENGTH, SAMPLES, captured, example, to_double
from tests.planner.examples import paper
from tests.planner.programs import analysed, uncut
from tests.transforms.plans import zoo_program


class Chosen(nn.Module):
    """Reads the rows of a class, as many as the labels tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chosen = torch.nonzero(labels > 1)[:, 0]
        return self.layer(x)[chosen].pow(2).sum() / (len(chosen) + 1)


def test_a_size_that_values_tell_costs_no_bytes_below_zero() -> None:
    graph = capture(Chosen(), {"x": torch.randn(8, 6), "labels": torch.arange(8) % 4})
    assert all(value_bytes(node) >= 0 for node in graph.graph.nodes)


class Stack(nn.Module):
    """Residual blocks of two products each, then a head: every size is easily worked out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = block(x)
        return self.head(x).sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@functools.cache
def stack() -> Graph:
    return capture(Stack(), {"x": torch.randn(7, 8)}, loss_fn=lambda out, **batch: out)


def test_costs_of_a_block_are_those_worked_out_by_hand() -> None:
    costs = program_costs(**uncut(stack()))
    assert (costs.rows, costs.num_blocks, costs.is_uniform, costs.units) == (7, 3, True, 1)
    block = costs.blocks[1]
    assert block.flops == 2 * 2 * 8 * 6
    assert block.parameter_bytes == 2 * 8 * 6 * 4
    assert costs.after.flops == 2 * 8 * 4
    assert costs.boundary_bytes == (8 * 4, 8 * 4)


def test_kept_are_inputs_and_results_of_products_once() -> None:
    # relu's result and up's, down's result; the block's input is the former block's sum
    assert program_costs(**uncut(stack())).blocks[1].activation_bytes == (6 + 6 + 8 + 8) * 4


def test_a_cut_divides_products_parameters_and_inner_values() -> None:
    graph = stack()
    block = program_costs(analysed(graph)).blocks[1]
    assert block.split_flops == block.flops
    assert block.split_parameter_bytes == block.parameter_bytes
    assert block.split_activation_bytes == (6 + 6) * 4
    assert (block.num_reductions, block.reduced_bytes) == (1, 8 * 4)
    assert (block.num_returns, block.returned_bytes) == (1, 8 * 4)
    assert block.sequence_activation_bytes == 0  # its only sequence is the rows


def test_products_before_sums_and_those_beside_which_cotangents_are_summed_are_counted() -> None:
    block = program_costs(analysed(stack())).blocks[1]
    product = 2 * 8 * 6
    assert (block.num_summed, block.summed_bytes, block.summed_flops) == (1, block.reduced_bytes, product)
    assert (block.num_beside, block.beside_bytes, block.beside_flops) == (1, block.returned_bytes, product)
    _, graph = captured("llama")
    block = program_costs(analysed(graph)).blocks[0]
    assert (block.num_summed, block.num_beside) == (block.num_reductions, block.num_returns)
    assert block.summed_flops + block.beside_flops == block.flops - block.attention_flops


def test_a_group_that_shares_the_sequence_holds_part_of_norms_and_residuals() -> None:
    _, graph = captured("llama")
    costs = program_costs(analysed(graph))
    block = costs.blocks[0]
    assert (block.num_reductions, block.num_returns) == (2, 2)
    assert costs.has_sequence
    assert block.in_sequence.activation_bytes_at(0.5) < block.activation_bytes_at(0.5)
    assert block.in_sequence.traffic_bytes_at(0.5) < block.traffic_bytes_at(0.5)
    assert block.in_sequence.parameter_bytes_at(0.5) == block.parameter_bytes_at(0.5)


def test_sums_of_the_backward_are_those_that_run_not_as_many_as_the_forward_has() -> None:
    _, graph = captured("mixtral")
    block = program_costs(analysed(graph)).blocks[1]
    assert (block.num_reductions, block.num_returns) == (2, 2)


def test_keys_and_values_of_a_block_are_what_devices_that_share_a_sequence_gather() -> None:
    _, graph = captured("llama")
    block = program_costs(**uncut(graph)).blocks[0]
    heads, channels = 3, 8
    assert (block.num_gathers, block.gathered_bytes) == (2, 2 * LENGTH * heads * channels * 8)


def test_units_are_the_size_of_the_smallest_class_that_is_cut() -> None:
    program = analysed(stack())
    inner = frozenset(c for c in program.factors.classes if c.size == 6)
    assert program_costs(program, shares=WorkShares(program.factors, inner)).units == 6
    assert program_costs(**uncut(stack())).units == 1


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "conv"])
def test_flops_are_those_that_torch_counts_in_the_eager_model(name: str) -> None:
    model, graph = captured(name)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**example(name))
    rows = example_rows(graph)
    assert program_costs(**uncut(graph)).whole.flops * rows == pytest.approx(counter.get_total_flops())


@pytest.mark.parametrize("name", SAMPLES)
def test_every_parameter_is_counted_once(name: str) -> None:
    model, graph = captured(name)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert program_costs(**uncut(graph)).whole.parameter_bytes == held


def test_a_product_that_torch_cannot_count_is_counted_by_its_rule() -> None:
    _, graph = captured("mixtral")
    counter, nodes = FlopCounter(analysed(graph).factors), graph.graph.nodes
    plain = sum(counter.flops(op) for op in nodes if isinstance(op.target, torch._ops.OpOverload)) / example_rows(graph)
    known = program_costs(**uncut(graph)).whole.flops
    experts = 2 * LENGTH * 2 * 3 * 2 * 48 * 112  # blocks, tokens, chosen experts, products, FLOPs
    assert known - plain == pytest.approx(experts)


def test_costs_per_row_do_not_depend_on_the_rows_of_the_step() -> None:
    costs = [program_costs(**uncut(stack()), rows=rows) for rows in (1, 100)]
    assert [c.rows for c in costs] == [1, 100]
    assert costs[0].blocks == costs[1].blocks


def test_a_captured_model_is_planned_from_end_to_end() -> None:
    _, graph = captured("llama")
    costs: ProgramCosts = program_costs(**uncut(graph), rows=24)
    plan = make_plan(costs, paper(0.02, 0.01))  # so slow that what running an op costs does not count
    plan.check(num_blocks=graph.num_blocks, world_size=2)
    assert [pipeline.share for pipeline in plan.pipelines] == [17, 7]  # both move all parameters, so not 16 and 8


@pytest.mark.parametrize("name", SAMPLES)
def test_costs_of_prepared_models_are_those_of_groups_too(name: str) -> None:
    program = zoo_program(name)
    costs = program_costs(program).whole
    assert 0 <= costs.split_flops <= costs.flops
    assert (costs.split_flops > 0) == (costs.num_reductions > 0)


def test_what_parts_hold_is_found_out_only_where_it_is_asked_for() -> None:
    found, quick = program_costs(**uncut(stack())), program_costs(**uncut(stack()), memory=False)
    assert quick.memory is None
    assert found.memory is not None
    assert replace(found, memory=None) == quick


def test_what_negligible_parts_hold_is_assumed() -> None:
    found = program_costs(**uncut(stack()))
    assert program_costs(**uncut(stack()), negligible_bytes=1.0) == found
    assert program_costs(**uncut(stack()), negligible_bytes=1e9) == replace(found, memory=None)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_negligible_needs_less_than_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    most_bytes = count._most_bytes
    monkeypatch.setattr(count, "_most_bytes", lambda *given: asked.append(most_bytes(*given)) or asked[-1])
    costs = program_costs(zoo_program(name))
    (device,) = expect(Plan.single(), costs, Cluster.on_paper([1e9])).devices
    assert device.total_bytes < asked[0]


def test_costs_at_other_sizes_are_those_of_a_graph_that_was_captured_with_them() -> None:
    batch, program = to_double(SAMPLES["llama"].batch(2, LENGTH - 5)), zoo_program("llama")
    other = make_program(capture(captured("llama")[0], batch), frozenset())
    sizes = program.bind(input_tensors(program.graph, batch))
    found = program_costs(program, rows=1, memory=False, sizes=sizes)
    assert found == program_costs(other, rows=1, memory=False)
    assert found != program_costs(program, rows=1, memory=False)


class Recurrent(nn.Module):
    """An op of two values: all outputs, and the last of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.cell(self.lead(x))
        return self.head(outputs.sin()).sum()

    def lead(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * self.head.weight.sum()


def test_both_values_of_a_recurrent_op_are_counted_as_kept() -> None:
    model = Recurrent()
    costs = program_costs(**uncut(capture(model, {"x": torch.randn(7, 5, 8)}, loss_fn=lambda out, **batch: out)))
    assert costs.whole.parameter_bytes == sum(parameter.numel() for parameter in model.parameters()) * 4
    outputs, last = 5 * 6 * 4, 6 * 4
    assert costs.whole.activation_bytes >= outputs + last


class ByLabels(nn.Module):
    """Makes as many numbers as there are different labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean() * torch.ones(torch.unique(labels).numel()).sum()


def test_an_op_that_makes_as_many_values_as_values_tell_is_counted_too() -> None:
    program = make_program(capture(ByLabels(), {"x": torch.randn(8, 6), "labels": torch.arange(8) % 4}), frozenset())
    costs = program_costs(program, memory=False)
    assert costs.before.flops + costs.after.flops == 2 * 6 * 6
