"""The local call of an op: operands in their places, literal sizes in this device's numbers."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from hetu_fx.deduction.factors.factors import FactorClass
from hetu_fx.program.program import Program
from hetu_fx.transforms.specialize.local_sizes import localized_call
from tests.transforms.plans import program_of

aten = torch.ops.aten


class Heads(nn.Module):
    """A fused projection viewed as (3, heads, width), heads concatenated after something else."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(7, 3 * 4 * 5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).view(x.shape[0], -1, 3, 4, 5)
        return torch.cat([heads, heads * 2], 1).reshape(x.shape[0], -1, 3, 20)


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(Heads(), (torch.randn(2, 6, 7),))


def heads_of(program: Program) -> FactorClass:
    return next(c for c in program.factors.classes if c.size == 4)


def localized(
    program: Program, target: Any, factor: FactorClass | None, part: int = 3, number: int = 0
) -> tuple[tuple[Any, ...], list[fx.Node]]:
    """Write the call of a node with this target; also return the local operands, made up here."""
    node = [n for n in program.graph.graph.nodes if n.target is target][number]
    local = fx.Graph()
    op = program.factors.op(node)
    operands = [local.placeholder(f"operand{i}") for i in range(len(op.operands))]
    others = {n: local.placeholder(f"other_{n.name}") for n in node.all_input_nodes}
    cut = () if factor is None else (factor,)
    args, _ = localized_call(node, op, operands, others, cut, lambda cls: part if cls in cut else cls.size or 0)
    return args, operands


def test_a_literal_size_becomes_the_local_part(program: Program) -> None:
    args, operands = localized(program, aten.reshape.default, heads_of(program))
    assert args[0] is operands[0]
    assert list(args[1][2:]) == [3, 3, 5]


def test_a_product_of_sizes_is_taken_with_the_local_part(program: Program) -> None:
    args, _ = localized(program, aten.reshape.default, heads_of(program), number=-1)
    assert list(args[1][2:]) == [3, 15]


def test_sizes_stay_where_nothing_is_split(program: Program) -> None:
    args, _ = localized(program, aten.reshape.default, None)
    assert list(args[1][2:]) == [3, 4, 5]


def test_symbolic_sizes_are_read_from_their_local_nodes(program: Program) -> None:
    args, _ = localized(program, aten.reshape.default, heads_of(program))
    assert isinstance(args[1][0], fx.Node)
    assert args[1][0].name.startswith("other_")


def test_operands_inside_a_list_are_replaced(program: Program) -> None:
    args, operands = localized(program, aten.cat.default, heads_of(program))
    assert list(args[0]) == operands
    assert args[1] == 1


class RowsTimesHeads(nn.Module):
    """Rows and heads in one dim, of a size that the graph computes."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(7, 4 * 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        return self.project(x).view(rows, -1, 4, 5).transpose(1, 2).reshape(rows * 4, -1, 5)


def test_a_size_that_counts_rows_and_parts_is_taken_with_the_local_part() -> None:
    program = program_of(RowsTimesHeads(), (torch.randn(2, 6, 7),))
    args, _ = localized(program, aten.reshape.default, heads_of(program), number=-1)
    size = args[1][0]
    assert (size.target, size.args[1]) == (operator.mul, 3)
    rest = size.args[0]
    assert (rest.target, rest.args[1]) == (operator.floordiv, 4)
    assert rest.args[0].name.startswith("other_")


def test_a_size_of_two_classes_that_are_both_cut_is_the_product_of_the_local_parts(program: Program) -> None:
    node = [n for n in program.graph.graph.nodes if n.target is aten.reshape.default][-1]
    op, local = program.factors.op(node), fx.Graph()
    parts = {cls: part for part, cls in enumerate(sorted(op.classes, key=lambda cls: cls.id), 2) if cls.size in (4, 5)}
    others = {n: local.placeholder(f"other_{n.name}") for n in node.all_input_nodes}
    operands = [local.placeholder("operand")]
    args, _ = localized_call(node, op, operands, others, parts, lambda cls: parts.get(cls, cls.size or 0))
    assert list(args[1][2:]) == [3, math.prod(parts.values())]
