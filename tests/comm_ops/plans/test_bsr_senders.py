"""Who sends: by load on the nearest link, or as one of the simpler choices that it is compared with."""

import pytest

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.comm_ops.plans.bsr_plan import Senders, TensorMove, plan_moves
from tests.oracles.bsr_reports import LowestRank, RoundRobin, plan_each

COPIES, SHARDS = parse_annotation("[0-3] D(4)"), parse_annotation("[4-7] S(0, 4)")


def senders(choice=Senders, **options):
    plan = plan_moves([TensorMove(COPIES, SHARDS, (8,), 4)], senders=choice, **options)
    return [(t.sender, t.receiver) for t in plan.transfers]


def test_load_spreads_over_all_copies():
    assert senders() == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_load_prefers_the_receivers_node():
    nodes = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 0, 7: 2}
    assert senders(node_of=nodes.__getitem__) == [(3, 4), (3, 5), (0, 6), (0, 7)]


def test_the_lowest_rank_sends_everything():
    assert senders(LowestRank) == [(0, 4), (0, 5), (0, 6), (0, 7)]


def test_round_robin_takes_turns_without_regard_to_nodes():
    nodes = [0, 0, 0, 1, 1, 1, 1, 1]
    assert senders(RoundRobin, node_of=nodes.__getitem__) == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("choice", [Senders, LowestRank, RoundRobin])
def test_nobody_sends_to_an_owner(choice):
    whole = parse_annotation("[0-7] D(8)")
    plan = plan_moves([TensorMove(whole, parse_annotation("[0-7] S(0, 8)"), (8,), 4)], senders=choice)
    assert plan.messages == []


def test_loads_are_shared_by_the_moves_of_a_plan_and_not_by_plans_of_their_own():
    moves = [TensorMove(parse_annotation("[0,1] D(2)"), parse_annotation("[2]"), (8,), 4)] * 2
    assert [message[0] for message in plan_moves(moves).messages] == [0, 1]
    assert [plan.messages[0][0] for plan in plan_each(moves)] == [0, 0]


def test_loads_grown_elsewhere_are_seen():
    loads = Senders(lambda rank: rank // 4)
    owners = loads.owners((0, 1, 2))
    loads.add(0, 3, 10)
    loads.add(1, 3, 5)
    chosen = []
    for _ in range(4):
        chosen.append(loads.sender(owners, 3))
        loads.add(chosen[-1], 3, 4)
    assert chosen == [2, 2, 1, 2]


def lookups(receivers):
    """Count how often planning asks for a node; the owners are as many as the receivers."""
    asked = []
    source = parse_annotation(f"[0-{receivers - 1}] D({receivers})")
    target = parse_annotation(f"[{receivers}-{2 * receivers - 1}] D({receivers})")
    plan_moves([TensorMove(source, target, (8,), 4)], node_of=lambda rank: asked.append(rank) or rank // 8)
    return len(asked)


def test_planning_is_linear_in_owners_and_receivers():
    assert lookups(512) <= 8.1 * lookups(64)
