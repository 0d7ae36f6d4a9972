"""Reports: what plans move, and that fused plans move no more than they must."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from tests.oracles.annotation_samples import random_annotation
from tests.oracles.bsr_reports import BsrReport, bsr_report, plan_each

SHAPE = (24, 8)


def node_of(rank):
    return rank // 2


def report(source, target, shape=(8, 8), **options):
    move = TensorMove(parse_annotation(source), parse_annotation(target), shape, 4)
    return bsr_report([plan_moves([move], node_of=node_of, **options)], node_of)


def test_a_report_counts_bytes_and_messages():
    assert report("[0,1] S(0, 2)", "[0] ") == BsrReport(128, 128, 0, 0, 128, 128, 1)
    assert report("[0] ", "[2,3] D(2)") == BsrReport(512, 512, 512, 256, 512, 256, 2)


def test_relays_cross_between_nodes_once():
    found = report("[0,1] D(2)", "[2,3] D(2)", relays=True)
    assert (found.inter_node_bytes, found.largest_send, found.num_messages) == (256, 128, 4)
    assert found.inter_node_bytes == found.least_inter_node_bytes
    assert found.total_bytes == found.least_bytes == 512


@pytest.mark.parametrize("target", ["[0-3] D(4)", "[0-3] S(0, 4)", "[0-3] D(2) S(1, 2)", "[4,5] S(0, 2)"])
def test_sums_move_no_more_than_a_ring_would(target):
    found = report("[0-3] P(4)", target, relays=True)
    assert found.total_bytes == found.least_bytes


def test_messages_of_many_tensors_are_fused_to_one_per_pair():
    moves = [TensorMove(parse_annotation("[0]"), parse_annotation("[1]"), (size,), 4) for size in range(1, 11)]
    fused, each = bsr_report([plan_moves(moves)]), bsr_report(plan_each(moves))
    assert (fused.num_messages, each.num_messages) == (1, 10)
    assert fused.total_bytes == each.total_bytes == fused.least_bytes


def random_moves(seed, partial):
    random = Random(seed)
    pairs = [[random_annotation(random, range(8), SHAPE, partial=partial) for _ in range(2)] for _ in range(3)]
    return [TensorMove(source, target, SHAPE, 4) for source, target in pairs]


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_a_fused_plan_without_sums_moves_exactly_the_least(seed):
    moves = random_moves(seed, partial=False)
    found = bsr_report([plan_moves(moves, node_of=node_of, relays=True)], node_of)
    assert found.total_bytes == found.least_bytes
    assert found.inter_node_bytes == found.least_inter_node_bytes


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_no_slice_crosses_between_nodes_where_the_receivers_node_owns_it(seed):
    moves = random_moves(seed, partial=False)
    for transfer in plan_moves(moves, node_of=node_of).transfers:
        owners = {
            rank
            for rank in moves[transfer.move].source.ranks
            if holds(moves[transfer.move].source, rank, transfer.dims)
        }
        if node_of(transfer.receiver) in set(map(node_of, owners)):
            assert node_of(transfer.sender) == node_of(transfer.receiver)


def holds(annotation, rank, dims):
    held = annotation.region(rank, SHAPE).dims
    return all(
        any(start <= wanted[0][0] < stop for start, stop in intervals)
        for intervals, wanted in zip(held, dims, strict=True)
    )


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_no_plan_moves_less_than_the_least(seed):
    moves = random_moves(seed, partial=True)
    for relays in (False, True):
        found = bsr_report([plan_moves(moves, node_of=node_of, relays=relays)], node_of)
        assert found.total_bytes >= found.least_bytes
        assert found.inter_node_bytes >= found.least_inter_node_bytes
