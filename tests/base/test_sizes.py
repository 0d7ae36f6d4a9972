import pytest

from hetu_fx.base.sizes import size_parts


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
