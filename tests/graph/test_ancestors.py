"""What a node is made of, and where the walk to it ends."""

from __future__ import annotations

import operator

from torch import fx

from hetu_fx.graph.edit import ancestors


def test_a_node_needs_itself_and_what_it_is_made_of_but_nothing_that_it_makes() -> None:
    graph = fx.Graph()
    x, y, other = graph.placeholder("x"), graph.placeholder("y"), graph.placeholder("other")
    both = graph.call_function(operator.add, (x, y))
    graph.call_function(operator.add, (both, other))
    assert ancestors([both]) == {both, x, y}
    assert ancestors([both, other]) == {both, x, y, other}
    assert ancestors([]) == frozenset()


def test_the_walk_ends_where_nothing_more_is_asked_for() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(operator.neg, (x,))
    second = graph.call_function(operator.neg, (first,))
    assert ancestors([second], lambda node: () if node is first else node.all_input_nodes) == {second, first}
