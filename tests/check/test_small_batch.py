"""A trial's batch has few rows, of which all shares and micro-batches show, and short sequences."""

from __future__ import annotations

import torch

from hetu_fx.check.model import Narrowing
from hetu_fx.check.small_batch import (
    TrialSizes,
    cut_batch,
    cut_rows,
    fewest_rows,
    sequence_length_for,
    with_few_micro_batches,
    with_few_pipelines,
)
from hetu_fx.plans.plan import Pipeline, Plan, Stage, micro_batch_rows, pipeline_rows
from tests.check.nets import Tokens, graph_of, tokens_batch


def test_unequal_shares_stay_unequal_and_every_micro_batch_has_two_rows() -> None:
    plan = Plan((Pipeline((Stage((0,)),), share=1000, micro_batches=2), Pipeline((Stage((1,)),), share=617)))
    rows = pipeline_rows(fewest_rows(plan, 2), plan)
    assert rows[0] > rows[1] >= 2
    sizes = micro_batch_rows(rows[0], 2)
    assert min(sizes) >= 2
    assert len(set(sizes)) > 1


def test_shares_that_few_rows_cannot_show_have_some_all_the_same() -> None:
    plan = Plan.data_parallel((0, 1), (1000, 999))
    assert min(pipeline_rows(fewest_rows(plan, 2), plan)) >= 2


def test_a_pipeline_keeps_so_many_micro_batches_as_fill_it() -> None:
    plan = Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=32),))
    assert with_few_micro_batches(plan).pipelines[0].micro_batches == 4


def test_of_pipelines_that_are_alike_two_stay_on_devices_that_follow_each_other() -> None:
    groups = [Pipeline((Stage((3 * i, 3 * i + 1, 3 * i + 2), (2, 1, 1)),), share=2) for i in range(4)]
    plan = with_few_pipelines(Plan((*groups, Pipeline((Stage((12,)),)))))
    assert plan.summary() == "2 rows: [0,1,2 2:1:1] | 2 rows: [3,4,5 2:1:1] | 1 row: [6]"


def test_a_length_is_one_that_a_group_can_share() -> None:
    assert sequence_length_for(Plan.context_parallel((0, 1, 2), (2, 2, 1))) == 10
    assert sequence_length_for(Plan.single(0)) == 8


def test_rows_and_lengths_are_cut_by_what_the_graph_says_of_its_inputs() -> None:
    given = tokens_batch(rows=6, length=24)
    program = graph_of(Tokens(blocks=2), given).program
    made = cut_batch(given, program, TrialSizes(8, 5), Narrowing({1500: 128}), torch.float64)
    assert isinstance(made, dict)
    assert program.row_dims == {"ids": 0, "labels": 0}
    assert made["ids"].shape == made["labels"].shape == (8, 5)
    assert torch.equal(made["ids"][:6], given["ids"][:, :5] % 128)
    assert torch.equal(made["ids"][6:], made["ids"][:2])  # taken again


def test_rows_without_a_graph_are_cut_where_they_are_said_to_be() -> None:
    made = cut_rows({"x": torch.arange(12.0).view(2, 6), "w": torch.ones(3)}, {"x": 1}, 4, torch.float64)
    assert isinstance(made, dict)
    assert torch.equal(made["x"], torch.arange(12.0, dtype=torch.float64).view(2, 6)[:, [0, 1, 3, 4]])  # far apart
    assert made["w"].shape == (3,)
    assert len(set(made["w"].tolist())) == 3  # ones hide what is lost
