"""The table of rules is tested by enumeration: each op on shards of each factor, forward and backward."""

from __future__ import annotations

import pytest
import torch

from hetu_fx.deduction.rules.build import full_name
from hetu_fx.deduction.rules.pointwise import ZERO_AT_ZERO
from hetu_fx.deduction.rules.registry import RULES
from tests.deduction.samples import SAMPLES
from tests.deduction.shards import check_factor, check_linear, cuts_of, find_op, trial_of

CALLS = [(op, i) for op in sorted(RULES) for i in range(len(SAMPLES.get(op, ())))]


def test_every_rule_has_a_sample() -> None:
    wildcards = {op for op in RULES if "*" in op}
    of_captures = {"hetu.leaf.default"}  # calls what a capture has met: tests/graph/leaves
    assert sorted(set(RULES) - set(SAMPLES) - wildcards - of_captures) == []


@pytest.mark.parametrize(("op", "index"), CALLS)
def test_shards_of_every_factor_give_the_whole_result_and_gradients(op: str, index: int) -> None:
    sample = SAMPLES[op][index]
    trial = trial_of(op, sample)
    for name in trial.cuttable() if sample.values else ():
        for cuts in cuts_of(trial.sizes[name], sample.unit):
            check_factor(trial, name, cuts)


@pytest.mark.parametrize(("op", "index"), CALLS)
def test_partial_operands_of_a_linear_set_give_partial_results(op: str, index: int) -> None:
    trial = trial_of(op, SAMPLES[op][index])
    for group in trial.factoring.linear:
        check_linear(trial, group)


@pytest.mark.parametrize("op", ZERO_AT_ZERO)
def test_ops_that_keep_zeros_give_zero_at_zero(op: str) -> None:
    zeros = torch.zeros(3)
    assert RULES[full_name(op)].traits.vanishing == {0}
    assert torch.equal(find_op(full_name(op))(zeros), zeros)
