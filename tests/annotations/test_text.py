"""Annotations read back from what they print."""

import pytest

from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Duplicate, Partial, Sharding, Split
from hetu_fx.annotations.text import parse_annotation
from hetu_fx.errors import AnnotationError


def test_a_single_group_prints_in_one_line():
    assert str(Annotation.on(range(4), Split(0, (2, 1)), Duplicate(2))) == "[0-3] S(0, 2:1) D(2)"
    assert str(Annotation.on((4,))) == "[4]"
    assert str(Annotation.on((5, 0), Split.even(1, 2, 3, 64))) == "[5,0] S(1, 2, 3x_x64)"


def test_a_union_names_its_top_first():
    groups = DeviceGroup((0, 1)), DeviceGroup((2,))
    a = Annotation(groups, (Sharding((Partial(2),)), Sharding()), Split(0, (3, 1)))
    assert str(a) == "S(0, 3:1) over {[0,1] P(2); [2]}"


@pytest.mark.parametrize(
    "text",
    [
        "[0-3] S(0, 2:1) D(2)",
        "[7]",
        "P(2) over {[0,1] S(1, 2); [2]}",
        "S(0, 1:0, 2x_x4) over {[0-2] P(3); [9,3] D(2)}",
    ],
)
def test_text_round_trips(text):
    assert str(parse_annotation(text)) == text


@pytest.mark.parametrize("text", ["", "[0-3", "[0,1] Q(2)", "[0,1] S(0)", "D(2) over {[0]; }", "[0] [1]"])
def test_malformed_text_is_refused_with_an_example(text):
    with pytest.raises(AnnotationError, match=r"write it like|distinct"):
        parse_annotation(text)
