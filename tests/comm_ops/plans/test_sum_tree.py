"""The tree that a sum over all ranks goes by: who is told what, in how few hops."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.comm_ops.plans.sum_tree import SumTree, sum_tree


def summed(tree: SumTree, numbers: Sequence[float]) -> list[float]:
    """Play the tree: what each rank has in the end."""
    has = list(numbers)
    for head in tree.heads:
        for rank in tree.steps(head).members:
            has[head] += has[rank]
    partners = {head: tree.steps(head).partners for head in tree.heads}
    for at_once in zip(*partners.values(), strict=True):
        new = {head: has[head] + has[partner] for head, partner in zip(partners, at_once, strict=True)}
        for head, number in new.items():
            has[head] = number
    return [has[tree.head_of[rank]] for rank in range(len(has))]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.randoms())
def test_every_rank_has_the_sum_over_all_to_the_same_bits(nodes: list[int], random: object) -> None:
    numbers = [random.random() for _ in nodes]  # type: ignore[attr-defined]
    found = summed(sum_tree(nodes), numbers)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(sum(numbers))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60))
def test_each_sends_to_one_head_and_heads_to_each_other(nodes: list[int]) -> None:
    tree = sum_tree(nodes)
    steps = [tree.steps(rank) for rank in range(len(nodes))]
    assert sorted([*tree.heads, *(rank for one in steps for rank in one.members)]) == list(range(len(nodes)))
    assert all(rank in tree.steps(one.head).members for rank, one in enumerate(steps) if one.head != rank)
    assert all(rank in tree.steps(partner).partners for rank, one in enumerate(steps) for partner in one.partners)


@pytest.mark.parametrize(("count", "per_node"), [(1, 8), (2, 1), (3, 4), (5, 8), (16, 8), (511, 8), (512, 8)])
def test_a_number_goes_by_at_most_two_hops_and_the_logarithm_of_nodes(count: int, per_node: int) -> None:
    tree = sum_tree([rank // per_node for rank in range(count * per_node)])
    assert tree.hops <= 2 + floor(log2(count))
    most = max(len(tree.steps(head).members) + len(tree.steps(head).partners) for head in tree.heads)
    assert most <= 2 * per_node + log2(count)
    assert summed(tree, [1.0] * count * per_node) == [count * per_node] * count * per_node


def test_ranks_of_a_node_send_to_its_first_and_spare_nodes_to_others() -> None:
    tree = sum_tree(["a", "b", "a", "c", "b"])
    assert (tree.heads, tree.head_of) == ((0, 1), (0, 1, 0, 0, 1))
    assert tree.steps(0).members == (2, 3)
