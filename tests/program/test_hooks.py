"""Hooks that change what passes are captured; others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn.utils import prune

from hetu_fx import Framework, register_framework
from hetu_fx.base import frameworks
from hetu_fx.errors import CaptureError
from tests.program.guarded import Watching


def looks(*given: Any) -> None: ...


def doubles(module: nn.Module, given: Any, output: Any) -> Any:
    return output * 2


def test_a_hook_that_changes_what_passes_is_in_the_graph() -> None:
    watching = Watching()
    before = watching.program()
    watching.model.layer.register_forward_hook(doubles)
    assert watching.program().fingerprint != before.fingerprint


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_only_looks_is_refused_by_its_name(register: str) -> None:
    watching = Watching()
    watching.program()
    handle = getattr(watching.model.layer, register)(looks)
    with pytest.raises(CaptureError, match=r"hook looks \(test_hooks.py:\d+\) of module 'layer' returns nothing"):
        watching.program()
    assert next(iter(watching.model.layer._forward_hooks.values()), looks) is looks
    handle.remove()
    watching.program()


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_submodules_are_refused(register: str) -> None:
    watching = Watching()
    getattr(watching.model.layer, register)(looks)
    with pytest.raises(CaptureError, match=r"module 'layer' has a backward (pre-)?hook looks"):
        watching.program()


def test_hooks_of_all_modules_are_refused_before_any_step() -> None:
    watching = Watching()
    watching.program()
    handle = nn.modules.module.register_module_forward_hook(looks)
    try:
        with pytest.raises(CaptureError, match=r"hook looks .* is registered for all modules"):
            watching.program()
    finally:
        handle.remove()


def test_hooks_of_the_model_itself_stay_outside_of_the_graph() -> None:
    watching = Watching()
    before = watching.program()
    watching.model.register_forward_hook(doubles)
    watching.model.scale = 2.0
    assert watching.program().fingerprint != before.fingerprint
    watching.model.scale = 1.0
    assert watching.program() is before


def test_hooks_of_torch_and_of_frameworks_belong_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = Watching()
    prune.l1_unstructured(watching.model.layer, "weight", amount=0.5)
    watching.program()
    monkeypatch.setattr(frameworks._frameworks, "known", dict(frameworks._frameworks.known))
    register_framework(Framework(name="mine", own_hooks=(looks.__module__,)))
    watching.model.layer.register_forward_hook(looks)
    watching.program()
