"""Wrong moves that are planted in what is decided are found by training as all ranks in one process."""

from __future__ import annotations

from random import Random

import pytest
import torch

from benchmarks.planted.__main__ import FAULTS, worlds_of
from benchmarks.planted.decisions import Transfers
from benchmarks.planted.faults import NOT_SENT, SHIFTED, TWICE
from benchmarks.planted.hunt import Hunt
from benchmarks.planted.trial import changes_transfers
from benchmarks.planted.worlds import WORLDS
from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves

FEW = {
    "a group cut 3:1": 5,
    "two replicas": 5,
    "a group before a device, beside a device": 8,
    "two pipelines that share the sequence": 6,
}


@pytest.mark.parametrize("name", FEW)
def test_planted_wrong_moves_are_found(name: str) -> None:
    hunt = Hunt(name, Random(sum(map(ord, name))))
    found = [hunt.plant() for _ in range(FEW[name])]
    assert [one.fault for one in found if not one.shown] == []
    assert {one.fault.kind for one in found} <= {SHIFTED, TWICE, NOT_SENT}


def test_a_change_that_changes_nothing_is_no_fault() -> None:
    whole, other = Annotation.replicated((0, 1)), Annotation.replicated((0, 1, 2))
    plan = plan_moves([TensorMove(whole, other, (4,), 8)])
    (transfer,) = (one for one in plan.transfers if one.receiver == 2)
    from_the_other = tuple(
        one if one is not transfer else type(one)(0, one.dims, one.numel, 1 - one.sender, 2, adds=False)
        for one in plan.transfers
    )
    assert not changes_transfers(plan, Transfers.of(plan, from_the_other))
    without = tuple(one for one in plan.transfers if one is not transfer)
    assert changes_transfers(plan, Transfers.of(plan, without))


def test_every_world_has_faults_and_together_they_are_as_many_as_asked_for() -> None:
    names = worlds_of(FAULTS)
    assert len(names) == FAULTS
    assert set(names) == set(WORLDS)
    assert {2, 64} <= {WORLDS[name].ranks for name in names}


def test_every_token_is_in_every_batch_so_that_no_gradient_is_zero() -> None:
    for batch in WORLDS["two replicas"].batches():
        assert len(batch["ids"].unique()) == len(batch["labels"].unique()) == 16
        assert batch["ids"].dtype == torch.int64
