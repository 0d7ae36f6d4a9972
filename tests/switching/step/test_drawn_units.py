"""Parameters that are gathered unit by unit, under drawn homes, rows, ties and frozen sets: the numbers of zero 1."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.lockstep import Lockstep
from hetu_fx.plans.plan import Plan
from tests.switching.step.unit_models import Words, assert_same, batch

BATCHES = [batch(seed=seed) for seed in range(2)]
NAMES = [name for name, _ in Words(2).named_parameters()]
SHARES = st.lists(st.integers(0, 5), min_size=2, max_size=3).filter(any).map(tuple)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Plan, bool, frozenset[str]]:
    """Draw a plan under zero 1, whether the head is the embedding, and what is frozen."""
    homes = draw(SHARES)
    rows = draw(st.lists(st.integers(1, 3), min_size=len(homes), max_size=len(homes)))
    frozen = draw(st.frozensets(st.sampled_from(NAMES), max_size=len(NAMES) - 1))
    return replace(Plan.data_parallel(len(homes), rows), zero=1, homes=homes), draw(st.booleans()), frozen


@settings(max_examples=8, deadline=None, derandomize=True)
@given(worlds())
def test_drawn_homes_rows_ties_and_frozen_sets_give_the_numbers_of_zero_1_bit_for_bit(
    world: tuple[Plan, bool, frozenset[str]],
) -> None:
    plan, tied, frozen = world
    torch.manual_seed(1)
    model = Words(2, tied=tied).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    lockstep = Lockstep(partial(torch.optim.AdamW, lr=1e-2))
    captured = lockstep.capture(model, BATCHES[0])
    expected = lockstep.train(model, BATCHES, plan, captured)
    for zero in (2, 3):
        assert_same(lockstep.train(model, BATCHES, replace(plan, zero=zero), captured), expected)
