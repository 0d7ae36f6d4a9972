"""Forms by value: their text, and what they say for ranks and sizes."""

import pytest

from hetu_fx.comm_ops.plans.algorithm import FLAT, Algorithm, by_node, lanes, parse_algorithm, spans
from hetu_fx.errors import CommError


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (FLAT, ""),
        (Algorithm((0, 0, 1)), "nodes 0,0,1"),
        (Algorithm((0, 0, 1), 0), "nodes 0,0,1 from 0"),
        (Algorithm((0, 1, 0, 12), 4096, 512), "nodes 0,1,0,12 from 4096; padded below 512"),
        (Algorithm(padded_below=512), "padded below 512"),
    ],
)
def test_forms_round_trip_as_text(form, text):
    assert str(form) == text
    assert parse_algorithm(text) == form


@pytest.mark.parametrize("text", ["nodes", "nodes 0,1 padded below 2", "; padded below 2", "fast"])
def test_other_text_is_refused(text):
    with pytest.raises(CommError, match="cannot read the form"):
        parse_algorithm(text)


def test_two_levels_need_bytes_and_nodes_of_several_ranks():
    form = Algorithm((0, 0, 1, 1), 100)
    assert (form.in_two_levels(99), form.in_two_levels(100)) == (False, True)
    assert not Algorithm((0, 0, 1, 1)).in_two_levels(10**9)
    assert not form.within([4, 5, 6, 7], [4, 6]).in_two_levels(100)
    assert form.within([4, 5, 6, 7], [6, 5, 4]) == Algorithm((1, 0, 0), 100)
    assert [spans(nodes) for nodes in ((0, 0), (0, 1), (0, 1, 1))] == [False, False, True]


def test_lanes_take_one_rank_of_every_node():
    levels = by_node((5, 6, 7, 1, 2), (0, 0, 0, 1, 1))
    assert levels == ((5, 6, 7), (1, 2))
    assert lanes(levels) == ((5, 1), (6, 2), (7, 1))
    with pytest.raises(CommError, match="a form of 1 nodes does not fit ranks"):
        by_node((5, 6), (0,))


def test_what_nodes_stand_in_is_told_too():
    form = Algorithm((0, 0, 1, 1), 8, outer=((0, 0, 0, 0), (0, 0, 1, 1)))
    assert str(form) == "nodes 0,0,1,1 in 0,0,0,0 in 0,0,1,1 from 8"
    assert parse_algorithm(str(form)) == form
    assert form.within([4, 5, 6, 7], [6, 4]) == Algorithm((1, 0), 8, outer=((0, 0), (1, 0)))
