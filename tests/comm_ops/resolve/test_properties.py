"""Any annotation becomes any other, values and gradients, as the definition says: random pairs in one process."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import Annotation, Sharding, Split, cotangent, parse_annotation
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.plans.cost import EqualLinks
from hetu_fx.comm_ops.plans.transition import Transition, parse_transition
from hetu_fx.comm_ops.resolve.resolution import AxisStep, MoveStep, TopStep
from hetu_fx.comm_ops.resolve.resolve import resolve
from tests.oracles.annotation_reference import shard, unshard
from tests.oracles.annotation_samples import random_annotation, random_cotangent, random_pair
from tests.oracles.resolution_reference import run, run_adjoint
from tests.oracles.resolution_simulated import simulate, simulate_moves

SHAPE = (24, 8)
SHAPES = [(24, 8), (24, 4, 6), (8, 12, 2), (36,), (0, 8), (12, 0, 4)]
DEVICES = range(12)
SEEDS = st.integers(0, 2**32 - 1)


class Nodes(EqualLinks):
    """Three ranks in each node, ten times faster inside."""

    def bytes_per_second(self, a, b):
        return 1e4 if a // 3 == b // 3 else 1e3

    def latency_seconds(self, a, b):
        return 1e-3

    def node_of(self, rank):
        return rank // 3


NODES = Nodes()


def value(shape=SHAPE, seed=7):
    return np.random.default_rng(seed).standard_normal(shape)


def noisy(x: np.ndarray, annotation: Annotation) -> dict[int, np.ndarray]:
    return shard(x, annotation, np.random.default_rng(8).standard_normal)


def tensors(locals_):
    return {rank: torch.from_numpy(x) for rank, x in locals_.items()}


def check(annotation: Annotation, arrays, expected) -> None:
    assert set(arrays) >= set(annotation.ranks)
    for copy in range(len(annotation.copy_sets)):
        found = unshard({r: arrays[r] for r in annotation.ranks}, annotation, expected.shape, copy)
        np.testing.assert_allclose(found, expected, atol=1e-12)
    for rank, array in shard(expected, annotation).items():
        assert arrays[rank].shape == array.shape
        if not annotation.has_partial:
            np.testing.assert_allclose(arrays[rank], array, atol=1e-12)


@settings(max_examples=250)
@given(SEEDS)
def test_resolutions_mean_what_the_annotations_say(seed):
    random = Random(seed)
    shape = random.choice(SHAPES)
    source, target = random_pair(random, DEVICES[: random.choice((4, 6, 8, 12))], shape)
    resolution = resolve(source, target, shape, topology=random.choice((None, NODES)))
    event(" ".join(step.op for step in resolution.steps))
    check(target, run(resolution, noisy(value(shape), source)), value(shape))


@settings(max_examples=250)
@given(SEEDS)
def test_adjoints_are_adjoint(seed):
    random = Random(seed)
    shape = random.choice(SHAPES)
    source, target = random_pair(random, DEVICES[: random.choice((4, 6, 8, 12))], shape)
    gradient = random_cotangent(random, target)
    resolution = resolve(source, target, shape, gradient, topology=random.choice((None, NODES)))
    x, y = noisy(value(shape), source), noisy(value(shape, seed=9), gradient)
    forward, backward = run(resolution, x), run_adjoint(resolution, y)
    check(cotangent(source), backward, value(shape, seed=9))
    across = unshard(forward, target, shape), unshard(y, gradient, shape)
    back = unshard(x, source, shape), unshard(backward, cotangent(source), shape)
    np.testing.assert_allclose(np.vdot(*across), np.vdot(*back), atol=1e-9)


@settings(max_examples=100)
@given(SEEDS)
def test_what_packs_and_unpacks_does_what_the_reference_does(seed):
    random = Random(seed)
    source, target = random_pair(random, range(6), SHAPE)
    resolution, held = resolve(source, target, SHAPE), noisy(value(), source)
    expected, found = run(resolution, held), simulate(resolution, tensors(held))
    for rank in target.ranks:
        np.testing.assert_allclose(found[rank].numpy(), expected[rank], atol=1e-12)


def with_a_dim_in_front(annotation: Annotation) -> Annotation:
    shardings = tuple(Sharding(tuple(map(_one_dim_on, s.axes))) for s in annotation.shardings)
    return Annotation(annotation.groups, shardings, annotation.top and _one_dim_on(annotation.top))


def _one_dim_on(state):
    return replace(state, dim=state.dim + 1) if isinstance(state, Split) else state


@settings(max_examples=100)
@given(SEEDS, st.integers(0, 3))
def test_a_symbolic_dim_takes_any_size(seed, size):
    random = Random(seed)
    source, target = (with_a_dim_in_front(a) for a in random_pair(random, range(6), SHAPE))
    resolution = resolve(source, target, (None, *SHAPE))
    x = value((size, *SHAPE))
    check(target, {r: y.numpy() for r, y in simulate(resolution, tensors(noisy(x, source))).items()}, x)


@settings(max_examples=150)
@given(SEEDS)
def test_nothing_moves_more_bytes_than_one_batched_send_receive(seed):
    random = Random(seed)
    source, target = random_pair(random, DEVICES, SHAPE)
    resolution = resolve(source, target, SHAPE)
    direct = sum(size for part in MoveStep(source, target, target, SHAPE).rounds(1) for *_, size in part)
    if any(not isinstance(step, AxisStep) for step in resolution.steps):
        assert resolution.bytes(1) <= direct
    if not source.has_partial and not target.has_partial:
        assert resolution.bytes(1) == TensorMove(source, target, SHAPE, 1).least_bytes


@settings(max_examples=250)
@given(SEEDS)
def test_what_crosses_groups_is_counted_as_if_every_collective_were_listed(seed):
    random = Random(seed)
    shape = random.choice(SHAPES)
    for step in resolve(*random_pair(random, DEVICES, shape), shape).steps:
        if isinstance(step, TopStep):
            event(step.op)
            assert step.traffic == sum((len(ranks) - 1) * numel for ranks, numel in step.collectives())


@settings(max_examples=100)
@given(SEEDS)
def test_measured_links_never_make_it_slower(seed):
    random = Random(seed)
    source, target = random_pair(random, DEVICES, SHAPE)
    plain, measured = (resolve(source, target, SHAPE, topology=topology) for topology in (None, NODES))
    assert measured.seconds(4, NODES) <= plain.seconds(4, NODES) * (1 + 1e-9)


@settings(max_examples=100)
@given(SEEDS)
def test_several_moves_share_their_messages(seed):
    random = Random(seed)
    pairs = [[random_annotation(random, range(6), SHAPE) for _ in range(2)] for _ in range(3)]
    moves = [TensorMove(source, target, SHAPE, 8) for source, target in pairs]
    plan = plan_moves(moves, node_of=lambda rank: rank // 2, relays=random.random() < 0.5)
    before = [tensors(noisy(value(), source)) for source, _ in pairs]
    held = {rank: [part.get(rank) for part in before] for rank in range(6)}
    after = simulate_moves(plan, held, [torch.empty(0, 0, dtype=torch.float64)] * 3)
    assert len({message[:2] for message in plan.messages}) == len(plan.messages)
    for number, (_, target) in enumerate(pairs):
        results = {rank: after[rank][number] for rank in range(6)}
        assert {rank for rank, x in results.items() if x is not None} == set(target.ranks)
        check(target, {rank: x.numpy() for rank, x in results.items() if x is not None}, value())


def test_what_stays_is_the_tensor_itself_and_a_summand_never_is():
    copies, one, sum_ = (parse_annotation(text) for text in ("[0,1] D(2)", "[0]", "[0,1] P(2)"))
    x = torch.from_numpy(value())
    for source, same in ((copies, True), (sum_, False)):
        plan = plan_moves([TensorMove(source, one, SHAPE, 8)])
        (found,) = simulate_moves(plan, {0: [x], 1: [x]}, [x])[0]
        assert (found is x) is same
        assert torch.equal(found, x if same else x + x)


@settings(max_examples=100)
@given(SEEDS)
def test_annotations_and_changes_round_trip_as_text(seed):
    random = Random(seed)
    source, target = (random_annotation(random, range(20), SHAPE) for _ in range(2))
    assert parse_annotation(str(source)) == source
    change = Transition(source, target, (None, *SHAPE))
    assert parse_transition(str(change)) == change


@pytest.mark.parametrize("seed", range(5))
def test_plans_are_the_same_wherever_they_are_made(seed):
    random = Random(seed)
    source, target = (random_annotation(random, range(6), SHAPE) for _ in range(2))
    first, second = (plan_moves([TensorMove(source, target, SHAPE, 4)]) for _ in range(2))
    assert first == second
