"""Hetu's own JSON, with the number of subgroups multiplied into its degrees."""

import pytest

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.annotations.hetu_json import read_leaf, read_leaves, write_leaf
from hetu_fx.errors import AnnotationError

WEIGHT = {
    "split": {"0": [4, 1]},
    "dup": [2, 2],
    "device_group_union": [[28, 29, 30, 31], [38]],
    "type": "variable",
}
DATA = {
    "split": {"0": [2, 2]},
    "dup": [4, 1],
    "device_group_union": [[0, 1, 2, 3], [4]],
    "type": "placeholder",
}


def test_a_weight_is_duplicated_over_subgroups():
    assert str(read_leaf(WEIGHT)) == "D(2) over {[28-31] S(0, 4); [38]}"
    assert write_leaf(read_leaf(WEIGHT), "variable") == WEIGHT


def test_data_is_split_over_subgroups():
    assert str(read_leaf(DATA)) == "S(0, 2) over {[0-3] D(4); [4]}"
    assert write_leaf(read_leaf(DATA), "placeholder") == DATA


def test_a_single_group_has_no_factor():
    leaf = {"split": {"1": [2]}, "dup": [2], "device_group_union": [[0, 1, 2, 3]], "type": "variable"}
    assert str(read_leaf(leaf)) == "[0-3] D(2) S(1, 2)"
    assert write_leaf(read_leaf(leaf), "variable") == leaf


def test_a_plan_is_walked_to_its_leaves():
    tree = {"zero": True, "model": {"blocks": {"block0": {"range": [0], "dense": WEIGHT}}}, "input": DATA}
    assert [path for path, _ in read_leaves(tree)] == ["model.blocks.block0.dense", "input"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dup": [1, 1]}, "dup of a Hetu leaf holds a factor of 2"),
        ({"dup": [2]}, "one entry per subgroup"),
        ({"type": "buffer"}, "a type of"),
        ({"split": {"0": [2, 1]}}, "needs 2 devices"),
    ],
)
def test_leaves_that_contradict_themselves_are_refused(change, message):
    with pytest.raises(AnnotationError, match=message):
        read_leaf({**WEIGHT, **change})


@pytest.mark.parametrize(
    "text",
    [
        "[0,1] S(0, 2:1)",
        "[0,1] P(2)",
        "[0,1] S(0, 2, 2x_x1)",
        "[0-3] S(0, 2) D(2)",
        "S(0, 2) over {[0]; [1]}",
    ],
)
def test_what_hetus_json_cannot_say_is_refused(text):
    with pytest.raises(AnnotationError):
        write_leaf(parse_annotation(text), "variable")
