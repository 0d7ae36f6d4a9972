"""The page of Python names has every public one, and what each says is whole."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hetu_fx

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
MADE_BY_US = (hetu_fx.Handle,)  # users are given one


@pytest.mark.parametrize("name", hetu_fx.__all__)
def test_a_public_name_stands_on_the_page_under_its_own_module(name: str) -> None:
    value = getattr(hetu_fx, name)
    assert f"\n::: {value.__module__}.{name}\n" in PAGE


def test_the_page_has_no_other_names() -> None:
    assert sorted(name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", PAGE, re.MULTILINE)) == sorted(
        hetu_fx.__all__
    )


@pytest.mark.parametrize("name", hetu_fx.__all__)
def test_a_public_name_says_what_it_does_and_what_each_argument_is(name: str) -> None:
    value = getattr(hetu_fx, name)
    said = inspect.getdoc(value) or ""
    assert said.splitlines()[0].endswith((".", "`."))
    assert [parameter for parameter in parameters(value) if not names(said, parameter)] == []


@pytest.mark.parametrize("name", sorted(name for name in vars(hetu_fx.Handle) if not name.startswith("_")))
def test_what_a_handle_can_do_says_what_each_argument_is(name: str) -> None:
    value = vars(hetu_fx.Handle)[name]
    said = inspect.getdoc(value) or ""
    assert said
    function = value if inspect.isfunction(value) else value.fget
    assert [parameter for parameter in parameters(function) if not names(said, parameter)] == []


def parameters(value: Any) -> Iterator[str]:
    """Yield the names of what users pass; of exceptions, enumerations and what we make they pass nothing."""
    if value in MADE_BY_US or (isinstance(value, type) and issubclass(value, Exception | enum.Enum)):
        return
    yield from (name for name in inspect.signature(value).parameters if name != "self")


def names(said: str, parameter: str) -> bool:
    """Tell whether a text has a word."""
    return re.search(rf"\b{parameter}\b", said) is not None
