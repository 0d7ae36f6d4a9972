"""Dtypes of parameters, and which are trained, are compared in one call, whatever surrounds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hetu_fx.program import structure
from hetu_fx.program.structure import Traits


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 3), requires_grad=bool(number % 2)) for number in range(4)]


CHANGES: dict[str, Callable[[nn.Parameter], None]] = {
    "trained": lambda p: p.requires_grad_(),
    "a dtype": lambda p: setattr(p, "data", p.data.double()),
}


@pytest.fixture(params=["by torch", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch compare them, or have no such thing."""
    if request.param == "one by one":
        monkeypatch.setattr(structure, "make_tensor_guard", lambda tensors: None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_change_is_noticed(change: Callable[[nn.Parameter], None], grad: bool) -> None:
    every = parameters()
    before = Traits(every)
    with torch.set_grad_enabled(grad):
        assert before.hold()
        assert before.hold()
        change(every[2])
        assert not before.hold()


@pytest.mark.usefixtures("way")
def test_another_size_autocast_and_inference_are_no_change() -> None:
    every = parameters()
    before = Traits([*every, every[0]])  # tied
    for _ in range(2):
        assert before.hold()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert before.hold()
        with torch.inference_mode():
            assert before.hold()
    every[0].data = torch.ones(5)
    assert before.hold()


@pytest.mark.usefixtures("way")
def test_what_was_frozen_without_gradients_is_noticed_with_them() -> None:
    every = parameters()
    before = Traits(every)
    with torch.no_grad():
        assert before.hold()
    every[1].requires_grad_(False)
    assert not before.hold()


@pytest.mark.usefixtures("way")
def test_a_model_without_parameters_never_changes() -> None:
    assert Traits([]).hold()
