"""Who sends what to whom: Hetu's own examples, and what plans promise."""

import pytest

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.errors import ResolveError
from tests.oracles.bsr_reports import bytes_sent


def plan(source, target, shape=(8, 8), **options):
    return plan_moves([TensorMove(parse_annotation(source), parse_annotation(target), shape, 4)], **options)


def hops(plan, dim=1):
    """(first index of the slice, sender, receiver) of every transfer."""
    return [(t.dims[dim][0][0], t.sender, t.receiver) for t in plan.transfers]


def test_four_shards_become_two_replicas_of_two():
    found = hops(plan("[0-3] S(1, 4)", "[0-3] D(2) S(1, 2)"))
    assert found == [
        (0, 0, 0), (0, 0, 2), (2, 1, 0), (2, 1, 2), (4, 2, 1), (4, 2, 3), (6, 3, 1), (6, 3, 3)
    ]  # fmt: skip


def test_copies_share_the_load_of_sending_to_another_node():
    found = plan("[0-3] D(2) S(1, 2)", "[4-7] S(1, 4)", node_of=lambda rank: rank // 4)
    assert hops(found) == [(0, 0, 4), (2, 2, 5), (4, 1, 6), (6, 3, 7)]


def test_survivors_send_only_what_is_missing():
    # D(2) S(1, 2) on 0-3 without rank 3 holds column halves on 0, 1 and a copy of the first half on 2.
    whole = parse_annotation("[0,1] S(1, 2)")
    found = plan_moves([TensorMove(whole, parse_annotation("D(2) over {[0,1] S(1, 2); [2]}"), (8, 8), 4)])
    assert found.messages == [(0, 2, 128), (1, 2, 128)]


def test_a_sender_on_the_same_node_is_preferred():
    found = plan("[0,1] D(2)", "[2]", node_of=lambda rank: rank % 2 ^ 1)
    assert found.messages == [(0, 2, 256)]


def test_every_summand_is_sent_once_and_added_in_order():
    found = plan("[0-2] P(3)", "[3]")
    assert [(t.sender, t.adds) for t in found.transfers] == [(0, False), (1, True), (2, True)]
    assert bytes_sent(found, 1) == 256


def test_a_reduced_shard_costs_what_a_reduce_scatter_costs():
    found = plan("[0-3] P(4)", "[0-3] S(0, 4)")
    assert sum(num_bytes for *_, num_bytes in found.messages) == 3 * 8 * 8 * 4


def test_receivers_on_a_far_node_share_what_they_get():
    found = plan("[0,1] D(2)", "[2,3] D(2)", node_of=lambda rank: rank // 2, relays=True)
    assert found.messages == [(0, 2, 128), (1, 3, 128)]
    assert found.relay.messages == [(2, 3, 128), (3, 2, 128)]
    assert bytes_sent(plan("[0,1] D(2)", "[2,3] D(2)", node_of=lambda rank: rank // 2), 0) == 256


def test_many_receivers_of_a_sum_share_the_summing():
    direct, shared = (plan("[0-3] P(4)", "[0-3] D(4)", relays=relays) for relays in (False, True))
    assert [bytes_sent(direct, rank) for rank in range(4)] == [3 * 256] * 4
    assert [bytes_sent(shared, rank) for rank in range(4)] == [3 * 64 + 3 * 64] * 4
    assert plan("[0,1] P(2)", "[0,1] D(2)", relays=True).relay is None


def test_many_moves_between_two_ranks_make_one_message():
    a, b = parse_annotation("[0]"), parse_annotation("[1]")
    found = plan_moves([TensorMove(a, b, (size,), 2) for size in range(1, 100)])
    assert found.messages == [(0, 1, 2 * sum(range(1, 100)))]


def test_a_sub_factor_is_no_more_slices_than_a_plain_split():
    found = plan("[0,1] S(0, 2, 64x_x2)", "[0-3] S(0, 4, 64x_x2)", (512, 8))
    assert len(found.transfers) == 4


def test_what_does_not_divide_is_refused():
    with pytest.raises(ResolveError, match=r"cannot move .* of 7x8: cannot split dim 0 of size 7"):
        plan("[0,1] S(0, 2)", "[0]", (7, 8))
