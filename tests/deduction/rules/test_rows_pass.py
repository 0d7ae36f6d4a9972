"""Losses of pairs, triplets and labels go row by row, as does what is written at the same places of every row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hetu_fx.deduction.rules.call import make_call
from hetu_fx.deduction.rules.registry import find_rule
from hetu_fx.deduction.rules.rule import Factoring

aten = torch.ops.aten
ROWS, CLASSES = 3, 4
SCORES, SIGNS, LABELS = torch.rand(ROWS, CLASSES), torch.ones(ROWS), torch.tensor([0, 3, 1])
AT = torch.arange(CLASSES)
SQUARES = torch.rand(ROWS, CLASSES, CLASSES)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.triplet_margin_loss.default, (SCORES, SCORES + 1, SCORES - 1)),
    (aten.cosine_embedding_loss.default, (SCORES, SCORES + 1, SIGNS)),
    (aten.margin_ranking_loss.default, (SIGNS, SIGNS + 1, SIGNS)),
    (aten.hinge_embedding_loss.default, (SIGNS, SIGNS)),
    (aten.multi_margin_loss.default, (SCORES, LABELS)),
    (aten.multilabel_margin_loss.default, (SCORES, LABELS[:, None].expand(ROWS, CLASSES))),
    (aten.index_put.default, (SQUARES, [None, AT, AT], torch.ones(()))),
]


def factoring_of(op: Any, args: tuple[Any, ...]) -> Factoring:
    rule = find_rule(op)
    assert rule is not None
    return rule.factor(make_call(op, args, {}, op(*args), lambda x: x if isinstance(x, Tensor) else None))


@pytest.mark.parametrize(("op", "args"), CALLS[:-1], ids=[str(op) for op, _ in CALLS[:-1]])
def test_losses_are_means_over_rows(op: Any, args: tuple[Any, ...]) -> None:
    factoring = factoring_of(op, args)
    rows = frozenset(factoring.operands[0][0])
    assert len(rows) == 1
    assert factoring.averaged == rows
    assert not rows & factoring.whole


def test_rows_pass_where_their_diagonals_are_written_which_stay_whole() -> None:
    factoring = factoring_of(*CALLS[-1])
    rows, *places = factoring.operands[0]
    assert factoring.results[0][0] == rows
    assert not set(rows) & factoring.whole
    assert {name for dim in places for name in dim} <= factoring.whole
