from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.base.json_values import many, object_by_number
from hetu_fx.base.records import REQUIRED, Key, record, run_length_list
from hetu_fx.errors import PlanError


@dataclass(frozen=True)
class Part:
    n: int
    x: float = 0.5
    t: str | None = None

    def __post_init__(self) -> None:
        if self.n < 0:
            raise PlanError(f"n is {self.n}")


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    order: Literal["up", "down"] = "up"
    ranks: tuple[int, ...] = ()
    flag: bool = False
    first: Part = Part(0)


PART = record(Part, PlanError)
WHOLE = record(Whole, PlanError, format="whole/1", ranks=Key(name="devices", alias="ranks"))
PARTS = st.builds(Part, st.integers(0, 3), st.floats(0, 1), st.none() | st.text(max_size=2))
WHOLES = st.builds(Whole, st.lists(PARTS).map(tuple), st.sampled_from(["up", "down"]), flag=st.booleans(), first=PARTS)


@given(WHOLES)
def test_what_is_written_reads_back_equal(value: Whole) -> None:
    assert WHOLE.read(WHOLE.write(value), "here") == value


def test_types_and_defaults_are_those_of_the_fields_and_defaults_are_left_out() -> None:
    assert PART.read({"n": 3, "x": 2}, "here") == Part(3, 2.0, None)
    assert isinstance(PART.read({"n": 3, "x": 2}, "here").x, float)
    assert PART.write(Part(3)) == {"n": 3}
    assert list(WHOLE.write(Whole((Part(1),), ranks=(2,)))) == ["format", "parts", "devices"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], r"^here must be an object, not a list: \[\]"),
        ({}, r"^here: 'format' is missing\nhint: give a string"),
        ({"format": "whole/2", "parts": []}, "here: format is 'whole/2', but this version reads 'whole/1' only"),
        ({"format": "whole/1"}, "here: 'parts' is missing\nhint: give a list"),
        ({"format": "whole/1", "partz": []}, r"here: unknown key 'partz' \(did you mean 'parts'\?\)"),
        ({"format": "whole/1", "parts": 3}, "here: 'parts' must be a list, not a number: 3"),
        ({"format": "whole/1", "parts": [3]}, r"here: parts\[0\] must be an object, not a number: 3"),
        ({"format": "whole/1", "parts": [{}]}, r"here: parts\[0\]: 'n' is missing\nhint: give a whole number"),
        ({"format": "whole/1", "parts": [{"n": True}]}, "'n' must be a whole number, not a boolean: true"),
        ({"format": "whole/1", "parts": [{"n": -1}]}, r"^here: parts\[0\]: n is -1"),
        ({"format": "whole/1", "parts": [{"n": 1, "t": None}]}, "'t' must be a string, not null: null"),
        ({"format": "whole/1", "parts": [{"n": "a" * 200}]}, r"not a string: \"a{56}\.\.\.$"),
        ({"format": "whole/1", "parts": [], "first": {"x": "1"}}, "here: first: 'n' is missing|here: first: 'x' must"),
        ({"format": "whole/1", "parts": [], "ranks": [0.5]}, "'ranks' must be a list of whole numbers"),
        ({"format": "whole/1", "parts": [], "ranks": [], "devices": []}, "'devices' and 'ranks' are two names"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        WHOLE.read(value, "here")


def test_equal_values_in_a_row_are_written_once() -> None:
    values = run_length_list(PART)
    written = [{"count": 2, "n": 1}, {"count": 1, "n": 2}]
    assert values.write((Part(1), Part(1), Part(2))) == written
    assert values.read(written, "here") == (Part(1), Part(1), Part(2))
    with pytest.raises(PlanError, match=r"here\[0\]: count is 0\nhint: give the number of equal ones in a row"):
        values.read([{"count": 0, "n": 1}], "here")


def test_a_key_may_be_asked_for_never_written_or_written_always() -> None:
    one = record(Part, PlanError, x=Key(default=REQUIRED), n=Key(written="never", default=7), t=Key(written="always"))
    assert one.write(Part(3, 1.0)) == {"x": 1.0, "t": None}
    assert one.read({"x": 1}, "here") == Part(7, 1.0)


def test_numbers_by_whole_numbers_are_strings_in_the_file() -> None:
    values = object_by_number("tokens", PlanError)
    assert values.write({10: 1.0, 2: 0.5}) == {"2": 0.5, "10": 1.0}
    assert values.read({"2": 1}, "here.lengths") == {2: 1.0}
    with pytest.raises(PlanError, match=r"here: 'lengths' has keys \['two'\]\nhint: give whole numbers of tokens"):
        values.read({"two": 1}, "here.lengths")


def test_a_list_names_the_place_in_it() -> None:
    with pytest.raises(PlanError, match=r"here\[1\]: n is -1"):
        many(PART.values).read([{"n": 1}, {"n": -1}], "here")
