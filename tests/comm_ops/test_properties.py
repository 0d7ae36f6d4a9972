"""Any annotation becomes any other, in one process, as the reference says."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.reference import shard, unshard
from hetu_fx.annotations.samples import random_annotation
from hetu_fx.annotations.text import parse_annotation
from hetu_fx.comm_ops.bsr_plan import Move, plan_moves
from hetu_fx.comm_ops.change import Change, parse_change
from hetu_fx.comm_ops.resolve import resolve
from hetu_fx.comm_ops.simulated import simulate, simulate_moves

SHAPE = (24, 8)
SEEDS = st.integers(0, 2**32 - 1)


def value():
    return np.random.default_rng(7).standard_normal(SHAPE)


def locals_of(annotation):
    noise = np.random.default_rng(8).standard_normal
    return {rank: torch.from_numpy(x) for rank, x in shard(value(), annotation, noise).items()}


def check(annotation: Annotation, results):
    arrays = {rank: results[rank].numpy() for rank in annotation.ranks}
    for copy in range(len(annotation.copy_sets)):
        np.testing.assert_allclose(unshard(arrays, annotation, SHAPE, copy), value(), atol=1e-12)
    if not annotation.has_partial:
        for rank, array in shard(value(), annotation).items():
            np.testing.assert_allclose(arrays[rank], array, atol=1e-12)


@settings(deadline=None, max_examples=150)
@given(SEEDS)
def test_resolutions_mean_what_the_annotations_say(seed):
    random = Random(seed)
    source, target = (random_annotation(random, range(6), SHAPE) for _ in range(2))
    if random.random() < 0.5:  # the same groups, so that collectives have their chance
        target = random_annotation(random, range(6), SHAPE, groups=source.groups)
    check(target, simulate(resolve(source, target, SHAPE), locals_of(source)))


@settings(deadline=None, max_examples=100)
@given(SEEDS)
def test_several_moves_share_their_messages(seed):
    random = Random(seed)
    pairs = [[random_annotation(random, range(6), SHAPE) for _ in range(2)] for _ in range(3)]
    moves = [Move(source, target, SHAPE, 8) for source, target in pairs]
    plan = plan_moves(moves, node_of=lambda rank: rank // 2, relays=random.random() < 0.5)
    before = [locals_of(source) for source, _ in pairs]
    tensors = {rank: [held.get(rank) for held in before] for rank in range(6)}
    after = simulate_moves(plan, tensors, [torch.empty(0, 0, dtype=torch.float64)] * 3)
    assert len({message[:2] for message in plan.messages}) == len(plan.messages)
    for number, (_, target) in enumerate(pairs):
        results = {rank: after[rank][number] for rank in range(6)}
        assert {rank for rank, x in results.items() if x is not None} == set(target.ranks)
        check(target, results)


@settings(deadline=None, max_examples=100)
@given(SEEDS)
def test_annotations_and_changes_round_trip_as_text(seed):
    random = Random(seed)
    source, target = (random_annotation(random, range(20), SHAPE) for _ in range(2))
    assert parse_annotation(str(source)) == source
    change = Change(source, target, (None, *SHAPE))
    assert parse_change(str(change)) == change


@pytest.mark.parametrize("seed", range(5))
def test_plans_are_the_same_wherever_they_are_made(seed):
    random = Random(seed)
    source, target = (random_annotation(random, range(6), SHAPE) for _ in range(2))
    first, second = (plan_moves([Move(source, target, SHAPE, 4)]) for _ in range(2))
    assert first == second
