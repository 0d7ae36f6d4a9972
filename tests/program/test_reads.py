"""Values that were read hold as long as they are the same to a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetu_fx.graph.tracing.contents import ABSENT, frozen, same
from hetu_fx.program.reads import Read, Reads, show_value


def reads_of(space: dict[str, Any], *names: str) -> Reads:
    return Reads([Read(f"{name!r} of it", space, name) for name in names])


@pytest.mark.parametrize(
    ("value", "other"),
    [(1.0, 2.0), (1, True), (0.0, None), ("a", "b"), ([1, 2], [1, 3]), ({"a": [1]}, {"a": [2]}), ({1}, {2}), ([1], [])],
)
def test_another_value_does_not_hold(value: Any, other: Any) -> None:
    space = {"a": value}
    made = reads_of(space, "a")
    assert made.hold()
    space["a"] = other
    assert not made.hold()
    assert (show_value(value), show_value(other)) == (made.facts["'a' of it"], made.facts_now["'a' of it"])


@pytest.mark.parametrize("value", [1.0, 10**9, "text", float("nan"), [1.0, {"a": 2}], (1, [2]), {"a": {1, 2}}])
def test_an_equal_value_holds(value: Any) -> None:
    space = {"a": value}
    made = reads_of(space, "a")
    space["a"] = frozen(value) if isinstance(value, list | dict | tuple) else type(value)(str(value))
    assert made.hold()
    assert made.hold()


def test_a_container_that_changes_inside_does_not_hold() -> None:
    inner = [1.0]
    made = reads_of({"a": {"b": inner}}, "a")
    inner[0] = 2.0
    assert not made.hold()
    assert made.facts["'a' of it"] == "{'b': [1.0]}"


def test_what_was_not_there_and_is_there_does_not_hold() -> None:
    space: dict[str, Any] = {}
    made = reads_of(space, "a")
    assert made.hold()
    assert made.facts == {"'a' of it": repr(ABSENT)}
    space["a"] = None
    assert not made.hold()


def test_a_tensor_holds_until_it_is_written_or_another() -> None:
    space = {"a": torch.ones(2)}
    made = reads_of(space, "a")
    assert made.hold()
    space["a"].zero_()
    assert not made.hold()
    made = reads_of(space, "a")
    space["a"] = torch.zeros(2)
    assert not made.hold()


def test_an_attribute_that_hides_a_method_does_not_hold_and_others_do() -> None:
    space: dict[str, Any] = {}
    made = Reads([], [Read("'forward' of module 'x'", space, "forward")])
    space["count"] = 1
    assert made.hold()
    space["forward"] = print
    assert not made.hold()
    assert made.facts_now == {"'forward' of module 'x'": "print"}


def test_objects_are_compared_by_identity() -> None:
    assert not same(object(), object())
    assert not same([torch.ones(1)], [torch.ones(1)])
    tensor = torch.ones(1)
    assert same([tensor], [tensor])


def test_a_method_of_a_class_holds_until_it_is_another() -> None:
    class Made:
        @classmethod
        def of(cls) -> None:
            """Make one."""

    made = Reads([Read("Made.of", Made, "of")])
    assert made.hold(), "each look-up makes another object"
    Made.of = classmethod(lambda cls: None)
    assert not made.hold()


def test_what_is_shown_is_the_same_on_all_ranks() -> None:
    assert show_value({"b", "a"}) == "{'a', 'b'}"
    assert show_value(torch.ones(2, 3)) == "a tensor of shape [2, 3]"
    assert show_value(Reads) == show_value(reads_of({})) == "hetu_fx.program.reads.Reads"
    assert len(show_value(list(range(1000)))) == 80
