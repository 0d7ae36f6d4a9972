import math

import pytest

from hetu_fx.base.checks import check_not_negative, check_positive, check_source, size_parts
from hetu_fx.errors import ClusterError, PlanError


def test_what_is_in_range_passes() -> None:
    check_positive(PlanError, "part", bytes=1, seconds=0.5)
    check_not_negative(PlanError, "part", bytes=0)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_what_must_be_above_0_is_refused_by_name(value: float) -> None:
    with pytest.raises(ClusterError, match=rf"^device 3 has rate {value}\nhint: give a finite number above 0$"):
        check_positive(ClusterError, "device 3", memory_bytes=1, rate=value)


@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_what_may_be_0_is_refused_below(value: float) -> None:
    with pytest.raises(PlanError, match=rf"^link has latency_seconds {value}\nhint: give a finite number, 0 or more$"):
        check_not_negative(PlanError, "link", latency_seconds=value)


def test_where_a_figure_comes_from_is_one_of_three_words() -> None:
    check_source(PlanError, "times", "measured")
    with pytest.raises(PlanError, match=r"times has source 'estimated' \(did you mean 'estimate'\?\)"):
        check_source(PlanError, "times", "estimated")


@pytest.mark.parametrize(
    ("text", "kilo", "parts"),
    [
        ("7", 1000, ("7", 1)),
        ("1.5k", 1024, ("1.5", 1024)),
        ("5GB", 1000, ("5", 10**9)),
        ("5GB", 1024, ("5", 1 << 30)),
        (" 3 GiB ", 1000, ("3", 1 << 30)),
        ("2t", 1000, ("2", 10**12)),
        ("2X", 1000, None),
        ("big", 1000, None),
        ("-1M", 1024, None),
    ],
)
def test_sizes_are_read_as_they_are_written(text: str, kilo: int, parts: tuple[str, int] | None) -> None:
    assert size_parts(text, kilo) == parts
