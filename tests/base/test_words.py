"""Numbers as people write them."""

from __future__ import annotations

import pytest

from hetu_fx.base.words import bytes_text, format_used_bytes, ranks_text, seconds_text, share_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0"),
        (4.34e-5, "43.4 us"),
        (0.0164, "16.4 ms"),
        (0.9996, "1 s"),
        (9.291, "9.29 s"),
        (119.0, "119 s"),
        (150.0, "2.5 min"),
        (9000.0, "2.5 h"),
        (1e-9, "0.001 us"),
    ],
)
def test_seconds_have_the_unit_that_suits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (60.74e9, "60.7 GB"), (2.5e8, "250 MB")]
)
def test_bytes_have_the_unit_that_suits(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_bytes_of_a_limit_have_its_unit() -> None:
    assert format_used_bytes(2.5e9, 85.9e9) == "2.5 of 85.9 GB"
    assert format_used_bytes(2.5e8, 85.9e9) == "250 MB of 85.9 GB"


def test_shares_below_a_percent_are_not_nothing() -> None:
    assert [share_text(share) for share in (0.0, 1 / 512, 0.714, 1.0)] == ["0 %", "0.2 %", "71 %", "100 %"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "3"), ([1, 0], "0, 1"), ([0, 1, 2, 5], "0-2, 5"), ([0, 2, 4, 6], "0 ... 6 (4)"), (range(1024), "0-1023")],
)
def test_neighbouring_ranks_are_ranges(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
