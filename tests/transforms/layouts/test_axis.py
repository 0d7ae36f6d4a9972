"""The states of values on one axis, forward and cotangent, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from hetu_fx.deduction.factors.factors import FactorClass
from hetu_fx.graph.graph import LeafKind
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.axis import AxisDeduction, deduce_batch_axis, deduce_tensor_axis
from hetu_fx.transforms.layouts.reshard_cost import Prices, node_bytes
from hetu_fx.transforms.layouts.states import SUMMED, WHOLE, SplitOn
from tests.transforms.plans import program_of

aten = torch.ops.aten


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class OverRows(nn.Module):
    """Calls a function of the rows of a projection."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class InPieces(nn.Module):
    """A parameter in two pieces, one of them changed before it meets the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 10))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.split([4, 6], 1)
        return (x @ first.tanh()).sum() + (x @ second).sum()


class WithNorm(nn.Module):
    """Also returns a norm of its parameters, which no row has to do with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.weight.pow(2).sum(dim=(0, 1), keepdim=True)  # no number: it is no loss


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(TwoLayers(), (torch.randn(4, 6),))


def class_of(program: Program, parameter: str, dim: int) -> FactorClass:
    return next(c for c in program.factors.classes if (parameter, dim) in program.factors.occurrences(c))


def rows_of(program: Program) -> frozenset[FactorClass]:
    return frozenset(c for c in program.factors.classes if c.is_batch)


def parameters_of(program: Program) -> set[fx.Node]:
    return {leaf.node for leaf in program.graph.leaves_of(LeafKind.PARAMETER)}


def deduced(program: Program, splits: frozenset[FactorClass]) -> AxisDeduction:
    sizes = dict(zip(program.graph.graph.nodes, node_bytes(program.graph), strict=True))
    return deduce_tensor_axis(program.graph, program.factors, program.flow, splits, Prices(((0, 1),), sizes))


def over_rows(program: Program) -> AxisDeduction:
    return deduce_batch_axis(program.graph, program.factors, program.flow, rows_of(program))


def ops(program: Program, target: object) -> list[fx.Node]:
    return [node for node in program.graph.graph.nodes if node.target is target]


def test_a_split_width_goes_in_columns_and_comes_out_as_a_sum(program: Program) -> None:
    width = class_of(program, "up.weight", 0)
    axis = deduced(program, frozenset({width}))
    up, down = ops(program, aten.linear.default)
    assert axis.states[up] == SplitOn(width)
    assert axis.states[ops(program, aten.relu.default)[0]] == SplitOn(width)
    assert axis.decisions[down].result == SUMMED
    assert axis.states[down] == WHOLE


def before_two_layers(inputs: int) -> tuple[Program, AxisDeduction]:
    program = program_of(nn.Sequential(nn.Linear(inputs, 6), TwoLayers()), (torch.randn(4, inputs),))
    return program, deduced(program, frozenset({class_of(program, "1.up.weight", 0)}))


def test_the_input_of_a_column_split_gets_summands_of_its_cotangent() -> None:
    program, axis = before_two_layers(60_000)
    _, up, down = ops(program, aten.linear.default)
    assert [need.summed_cotangent for need in axis.needs(up)] == [True, False, False]
    assert not any(need.summed_cotangent for need in axis.needs(down)[:2])
    assert list(axis.talking()) == [up]


def test_summands_of_a_cotangent_flow_on_to_parameters_that_are_small() -> None:
    program, axis = before_two_layers(6)
    parameters = {leaf.name: leaf.node for leaf in program.graph.leaves_of(LeafKind.PARAMETER)}
    assert {parameters["0.weight"], parameters["0.bias"]} <= axis.summed_cotangents
    assert not axis.talks


def test_only_one_device_adds_the_bias_of_a_row_split(program: Program) -> None:
    axis = deduced(program, frozenset({class_of(program, "up.weight", 0)}))
    up, down = ops(program, aten.linear.default)
    assert [need.first_only for need in axis.needs(up)] == [False, False, False]
    assert [need.first_only for need in axis.needs(down)] == [False, False, True]


def test_nothing_is_split_where_no_class_is(program: Program) -> None:
    axis = deduced(program, frozenset())
    assert set(axis.states.values()) == {WHOLE}
    assert not axis.talks


def test_parameters_get_summands_of_their_gradients_from_split_rows(program: Program) -> None:
    axis = over_rows(program)
    assert parameters_of(program) <= axis.summed_cotangents
    assert not axis.talks


def test_a_sum_over_rows_stays_open_through_linear_ops() -> None:
    program = program_of(OverRows(lambda y: y.sum(0) * 2), (torch.randn(4, 6),))
    axis = over_rows(program)
    assert axis.states[program.graph.output_values[0]] == SUMMED
    assert not axis.talks


def test_a_sum_over_rows_is_needed_by_an_op_that_is_not_linear() -> None:
    program = program_of(OverRows(lambda y: y.sum(0).tanh()), (torch.randn(4, 6),))
    axis = over_rows(program)
    assert [node.target for node in axis.talking()] == [aten.tanh.default]


def test_an_operand_that_only_lends_its_dtype_splits_nothing() -> None:
    program = program_of(OverRows(lambda y: y.masked_fill(y.new_ones([], dtype=torch.bool), 0.0)), (torch.randn(4, 6),))
    axis = over_rows(program)
    assert axis.states[ops(program, aten.ones.default)[0]] == WHOLE
    assert not axis.talks


def test_an_op_on_all_rows_at_once_reads_rows_that_replicas_have_summed() -> None:
    program = program_of(OverRows(lambda y: y.cumsum(0)), (torch.randn(4, 6),))
    axis = over_rows(program)
    (placed,) = ops(program, torch.ops.hetu.place_rows.default)
    assert axis.states[placed] == SUMMED
    assert list(axis.talking()) == ops(program, torch.ops.hetu.own_rows.default)


def test_an_op_that_needs_a_split_class_whole_gathers_it() -> None:
    program = program_of(OverRows(lambda y: y.cumsum(-1)), (torch.randn(4, 6),))
    axis = deduced(program, frozenset({class_of(program, "layer.weight", 0)}))
    cumsum = ops(program, aten.cumsum.default)[0]
    assert axis.decisions[cumsum].needs[0].state == WHOLE
    assert list(axis.talking()) == [cumsum]


def test_an_op_with_a_form_for_parts_keeps_them_on_the_tensor_axis_alone() -> None:
    program = program_of(OverRows(lambda y: F.softmax(y, -1)), (torch.randn(4, 6),))
    width = class_of(program, "layer.weight", 0)
    axis = deduced(program, frozenset({width}))
    assert axis.states[ops(program, aten.softmax.int)[0]] == SplitOn(width)
    of_rows = program_of(OverRows(lambda y: F.softmax(y, 0)), (torch.randn(4, 6),))
    assert list(over_rows(of_rows).talking()) == ops(of_rows, aten.softmax.int)


def test_the_cotangent_of_a_mean_over_rows_is_summed_before_it_goes_back_to_the_rows() -> None:
    program = program_of(OverRows(lambda y: y - y.mean(0)), (torch.randn(4, 6),))
    axis = over_rows(program)
    subtracted = ops(program, aten.sub.Tensor)[0]
    rows, mean = axis.needs(subtracted)
    assert (rows.summed_cotangent, mean.summed_cotangent) == (False, True)
    assert mean.node not in axis.summed_cotangents


@pytest.mark.parametrize("function", [lambda y: y, lambda y: y - y.detach().sum()], ids=["rows", "with a detached sum"])
def test_gradients_of_parameters_stay_summands_until_the_end(function: Callable[[Tensor], Tensor]) -> None:
    program = program_of(OverRows(function), (torch.randn(4, 6),))
    axis = over_rows(program)
    assert parameters_of(program) <= axis.summed_cotangents


def test_summands_of_a_cotangent_flow_back_through_ops_on_parameters() -> None:
    program = program_of(InPieces(), (torch.randn(4, 6),))
    axis = over_rows(program)
    assert parameters_of(program) <= axis.summed_cotangents
    assert not axis.talks


def test_an_output_that_is_whole_everywhere_gets_its_gradient_in_one_place() -> None:
    program = program_of(WithNorm(), (torch.randn(4, 6),))
    axis = over_rows(program)
    norm = program.graph.output_values[1]
    assert axis.states[norm] == WHOLE
    assert norm in axis.summed_cotangents
    assert not axis.talks
