"""Globals and closures are found in the code of the user's own functions."""

from __future__ import annotations

import json
import sysconfig
from typing import Any

import pytest
import torch

from hetu_fx.program.code_reads import CodeReads, is_of_python, is_own_file
from tests.program import guarded

RATE, TABLE = 0.5, {"a": 1}


def helper() -> float:
    return RATE


def reads(function: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the values that are found, and what is reached."""
    reached: list[str] = []
    code = CodeReads(lambda value, label: reached.append(label))
    code.inspect_function(function)
    return {read.label: read.value for read in code.found.values()}, reached


def test_globals_are_found_through_functions_that_are_called() -> None:
    found, _ = reads(lambda: [helper() for _ in TABLE])
    assert found["global 'RATE' of test_code_reads.py"] == 0.5
    assert found["global 'TABLE' of test_code_reads.py"] == {"a": 1}


STRENGTH = 2.0


class Reversed(torch.autograd.Function):
    """Goes by a global in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * STRENGTH


def test_what_the_backward_of_an_autograd_function_reads_is_found() -> None:
    found, _ = reads(lambda: Reversed.apply(torch.ones(2)))
    assert found["global 'STRENGTH' of test_code_reads.py"] == 2.0


def test_variables_around_a_function_are_found_and_objects_among_them_reached() -> None:
    smoothing, settings = 0.1, guarded.Settings()

    def loss() -> float:
        return smoothing * settings.beta

    found, reached = reads(loss)
    assert 0.1 in found.values()
    assert any(label.startswith("'settings' around") for label in reached)


def test_values_of_the_users_modules_are_found() -> None:
    found, _ = reads(lambda: guarded.GLOBAL)
    assert found["tests.program.guarded.GLOBAL"] is guarded.GLOBAL


class OnDemand:
    """An optional package that is not installed: whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"no package has {name}")


PACKAGE = OnDemand()


def test_objects_that_import_on_demand_are_not_asked() -> None:
    _, reached = reads(lambda: PACKAGE)
    assert "global 'PACKAGE' of test_code_reads.py" in reached


def test_functions_of_libraries_are_not_looked_into() -> None:
    assert reads(json.dumps) == ({}, [])


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_packages_of_other_environments_are_libraries_too(folder: str) -> None:
    path = f"/home/someone/.local/lib/python3/{folder}/library/model.py"
    assert not is_own_file(path)
    assert not is_of_python(path.replace("/home/someone/.local/lib/python3", sysconfig.get_path("stdlib")))
    assert is_own_file("/home/someone/project/model.py")


class Settings:
    """A class that is never made into an object."""

    rate = 0.25

    class Inner:
        """Another in it."""

        depth = 3


def test_attributes_of_the_users_classes_are_found() -> None:
    found, _ = reads(lambda: Settings.rate * Settings.Inner.depth)
    assert (found["Settings.rate"], found["Inner.depth"]) == (0.25, 3)
