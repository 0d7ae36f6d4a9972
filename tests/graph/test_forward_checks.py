"""The error of a check is caught as what the forward raises, and as ours."""

from __future__ import annotations

import pickle

import pytest

from hetu_fx.errors import ForwardCheckError, HetuFxError
from hetu_fx.graph.forward_checks import Check


class Custom(ValueError):
    """Takes two values."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


@pytest.mark.parametrize("kind", [ValueError, AssertionError, KeyError, Custom, RuntimeError])
def test_an_error_is_of_both_types_and_says_where(kind: type[Exception]) -> None:
    error = Check("check_0", "model.py:4", "if y.max() >= n:", kind, "too large").error()
    assert isinstance(error, kind)
    assert isinstance(error, HetuFxError)
    lines = str(error).splitlines()
    assert lines[0] == "too large"
    assert "model.py:4" in lines[1]
    assert kind.__name__ in lines[1]
    assert lines[1].endswith("if y.max() >= n:")


def test_a_type_of_another_layout_gives_an_error_of_ours_alone() -> None:
    error = Check("check_0", "model.py:4", "if bad:", OSError, "gone").error()
    assert type(error) is ForwardCheckError
    assert "raised as OSError" in str(error)


def test_an_error_reaches_another_process() -> None:
    error = Check("check_0", "model.py:4", "if bad:", KeyError, "").error()
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ForwardCheckError
    assert str(again) == str(error)
