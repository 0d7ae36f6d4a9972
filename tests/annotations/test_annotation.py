"""Annotations check and canonicalise themselves, and say what each rank holds."""

import pytest

from hetu_fx.annotations.annotation import (
    Annotation,
    DeviceGroup,
    Duplicate,
    Partial,
    Sharding,
    Split,
    cotangent,
    parse_annotation,
)
from hetu_fx.annotations.region import Box
from hetu_fx.errors import AnnotationError


def union(top, *members):
    groups = tuple(DeviceGroup(ranks) for ranks, *_ in members)
    return Annotation(groups, tuple(Sharding(tuple(axes)) for _, *axes in members), top)


def test_the_last_axis_varies_fastest():
    slow = Sharding((Duplicate(2), Split.even(0, 2)))
    fast = Sharding((Split.even(0, 2), Duplicate(2)))
    assert [slow.coordinates(i) for i in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    a, b = Annotation.on(range(4), *slow.axes), Annotation.on(range(4), *fast.axes)
    assert [a.region(r, (8,)).dims[0] for r in range(4)] == [((0, 4),), ((4, 8),)] * 2
    assert [b.region(r, (8,)).dims[0][0][0] for r in range(4)] == [0, 0, 4, 4]


def test_equal_shardings_are_equal_values():
    assert Sharding((Duplicate(2), Split(0, (1,)), Duplicate(3))) == Sharding((Duplicate(6),))
    assert Split(0, (4, 2)) == Split(0, (2, 1))
    assert hash(Annotation.on((0, 1), Partial(2))) == hash(Annotation.on([0, 1], Partial(1), Partial(2)))


def test_a_split_of_a_sub_factor_is_several_boxes():
    fused = Annotation.on((0, 1), Split(0, (2, 1), outer=3, inner=2))
    region = fused.region(0, (18, 5))
    assert region.boxes == tuple(Box(((start, start + 4), (0, 5))) for start in (0, 6, 12))
    assert region.local_boxes == tuple(Box(((start, start + 4), (0, 5))) for start in (0, 4, 8))
    assert fused.local_shape(1, (18, 5)) == (6, 5)


def test_a_union_is_cut_by_its_top_first():
    a = union(Split(0, (3, 1)), ((0, 1), Split(0, (2, 1))), ((2,),))
    assert [a.region(r, (12,)).dims[0] for r in a.ranks] == [((0, 6),), ((6, 9),), ((9, 12),)]
    assert a.position(1) == 1
    assert not a.holds(3)


def test_zero_units_hold_nothing():
    a = Annotation.on((0, 1), Split(0, (1, 0)))
    assert a.local_shape(1, (4, 3)) == (0, 3)
    assert a.region(1, (4, 3)).boxes == ()


def test_summands_are_numbered_over_both_tiers():
    a = union(Partial(2), ((0, 1), Partial(2)), ((2, 3), Duplicate(2)))
    assert [a.region(r, (4,)).summand for r in a.ranks] == [0, 1, 2, 2]
    b = union(Duplicate(2), ((0, 1), Partial(2)), ((2, 3), Duplicate(2)))
    assert [b.region(r, (4,)).summand for r in b.ranks] == [0, 1, None, None]
    assert b.copy_sets == ((0, 1), (2, 3))


def test_the_cotangent_of_partial_is_duplicate():
    a = union(Partial(2), ((0, 1), Partial(2)), ((2, 3), Split.even(0, 2)))
    assert cotangent(a) == union(Duplicate(2), ((0, 1), Duplicate(2)), ((2, 3), Split.even(0, 2)))
    assert a.has_partial
    assert not cotangent(a).has_partial


def test_a_shape_is_checked_on_both_tiers():
    a = union(Split(0, (3, 1)), ((0, 1), Split.even(0, 2)), ((2,),))
    a.check_shape((8, 3))
    with pytest.raises(AnnotationError, match="dim 0 of size 9"):
        a.check_shape((12, 3))
    with pytest.raises(AnnotationError, match="symbolic"):
        a.check_shape((None, 3))


def test_symbolic_dims_stay_whole():
    a = Annotation.on((0, 1), Split.even(1, 2))
    assert a.local_shape(0, (None, 6)) == (None, 3)
    with pytest.raises(AnnotationError, match=r"cannot split dim 1: it is symbolic"):
        a.local_shape(0, (6, None))
    with pytest.raises(AnnotationError, match="shape has 1 dims"):
        a.region(0, (6,))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Split(0, (0, 0)), "not all zero"),
        (lambda: Split(-1, (1, 1)), "dim >= 0"),
        (lambda: Duplicate(0), "at least 1 way"),
        (lambda: DeviceGroup((0, 0)), "distinct ranks"),
        (lambda: Sharding((Split.even(0, 2), Split.even(0, 2))), "split by more than one axis"),
        (lambda: Annotation.on((0, 1, 2), Duplicate(2)), r"needs 2 devices, group .* has 3"),
        (lambda: Annotation((), ()), "at least one"),
        (lambda: union(None, ((0,),), ((1,),)), "top must be None for one group"),
        (lambda: union(Duplicate(2), ((0,),)), "top must be None for one group"),
        (lambda: union(Duplicate(3), ((0,),), ((1,),)), "has 3 ways for 2 groups"),
        (lambda: union(Duplicate(2), ((0,),), ((0,),)), r"ranks \[0\] are in more than one group"),
        (lambda: Annotation.on((0, 1), Duplicate(2)).position(5), "rank 5 holds nothing"),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(AnnotationError, match=message):
        build()


def test_a_split_that_does_not_divide_names_dim_size_and_parts():
    with pytest.raises(AnnotationError, match=r"dim 1 of size 10 in parts 5:3:2:1\nhint: .* divides 10"):
        Annotation.on(range(4), Split(1, (5, 3, 2, 1))).local_shape(0, (4, 10))


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
