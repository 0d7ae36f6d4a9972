"""Stages in chunks, as all ranks of one process: what comes out is what one device makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Schedule, Stage

HOW = Lockstep(partial(torch.optim.AdamW, lr=1e-2))


class Block(nn.Module):
    """A residual block whose gate all blocks share, and that reads what stands before all of them."""

    def __init__(self, gate: nn.Parameter) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(12, 20), nn.Linear(20, 12), gate

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) * self.gate)) * first


class Tower(nn.Module):
    """Blocks between a table and a head that is the same table."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 12)
        gate = nn.Parameter(torch.rand(20))
        self.blocks = nn.ModuleList(Block(gate) for _ in range(blocks))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        first = x = self.table(tokens)
        for block in self.blocks:
            x = block(x, first)
        return nn.functional.cross_entropy((x @ self.table.weight.T).flatten(0, 1), labels.flatten())


def tower(blocks: int) -> nn.Module:
    torch.manual_seed(3)
    return Tower(blocks).double()


def batches(*rows: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(4)
    return [{name: torch.randint(0, 31, (count, 5)) for name in ("tokens", "labels")} for count in rows]


def pipeline(*groups: Sequence[int], micro_batches: int = 4, share: int = 1) -> Pipeline:
    return Pipeline(tuple(Stage(tuple(group)) for group in groups), share=share, micro_batches=micro_batches)


def interleaved(*pipelines: Pipeline, chunks: int = 2, zero: int = 1, schedule: Schedule = "interleaved") -> Plan:
    return Plan(pipelines, schedule=schedule, chunks=chunks, zero=zero)


def check_equal(
    blocks: int, plans: Plan | Sequence[Plan], rows: Sequence[int] = (9, 6, 3), how: Lockstep = HOW
) -> None:
    given = batches(*rows)
    made = how.train(tower(blocks), given, plans)
    verdict = judge("plan", train_alone(tower(blocks), given, how), made, 1e-10, "")
    assert verdict.verdict == "equal", verdict


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("stages", "chunks", "blocks"), [(2, 2, 5), (2, 3, 7), (3, 2, 6)])
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_any_number_of_micro_batches_goes_through_any_number_of_chunks(
    schedule: Schedule, stages: int, chunks: int, blocks: int, micro_batches: int
) -> None:
    own = pipeline(*([stage] for stage in range(stages)), micro_batches=micro_batches)
    check_equal(blocks, interleaved(own, chunks=chunks, schedule=schedule))


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_that_are_alike(zero: int) -> None:
    check_equal(4, interleaved(pipeline([0], [1]), pipeline([2], [3]), zero=zero))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_replicas_of_unlike_depths_and_groups(schedule: Schedule, zero: int) -> None:
    unlike = pipeline([0, 1], [2], share=3, micro_batches=2), pipeline([3], [4], [5], micro_batches=3), pipeline([6])
    check_equal(7, interleaved(*unlike, zero=zero, schedule=schedule), rows=(11, 5))


def test_ranks_bring_rows_of_their_own() -> None:
    check_equal(4, interleaved(pipeline([0], [1])), how=replace(HOW, rows=(8, 1)))


def test_plans_with_chunks_and_without_follow_each_other() -> None:
    whole = Plan((pipeline([0], [1], [2]),))
    plans = interleaved(pipeline([0], [1], [2])), whole, interleaved(pipeline([1], [0], micro_batches=3), chunks=3)
    plans = *plans, replace(plans[0], schedule="zero-bubble")
    named = [replace(plan, name=f"plan {number}") for number, plan in enumerate(plans)]
    check_equal(7, named, rows=(6, 6, 6, 6, 6), how=replace(HOW, plan_of_step=(0, 1, 2, 3, 0)))


def test_homes_go_to_a_plan_with_chunks_and_back() -> None:
    plans = [replace(interleaved(pipeline([0], [1])), name="two"), replace(Plan.single(), name="one")]
    how = replace(HOW, plan_of_step=(0, 1, 0), lost_by_step=((), (), ()))
    check_equal(4, plans, how=how)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_blocks_may_be_recomputed(schedule: Schedule) -> None:
    stages = Stage((0,), blocks=5, recompute=4), Stage((1,), blocks=2, recompute=1)
    check_equal(7, interleaved(Pipeline(stages, micro_batches=4), schedule=schedule))
