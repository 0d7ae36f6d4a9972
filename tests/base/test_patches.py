"""What is replaced in torch comes with the first home tensor, and goes as it came."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import optimizer
from torch.optim.optimizer import Optimizer
from torch.utils import _foreach_utils

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.base import patches
from hetu_fx.base.patches import (
    Hook,
    Patch,
    add_patch,
    install_patches,
    known_patches,
    register_patch,
    remove_patches,
)
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.switching.home import held  # noqa: F401  (with its hooks, and what sorts lists)
from hetu_fx.switching.home.layout import home_layout
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.migrate import in_flight  # noqa: F401  (with its hook)

SORT = "_group_tensors_by_device_and_dtype"


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    remove_patches("torch")
    yield
    install_patches("torch")


def home() -> HomeTensor:
    return HomeTensor(torch.ones(3), home_layout(Annotation.on((0,)), (3,), 0, 1))


def replaced() -> list[Any]:
    hooks = [len(getattr(optimizer, f"_global_optimizer_{when}_hooks")) for when in ("pre", "post")]
    types = [HomeTensor in module._foreach_supported_types for module in (_foreach_utils, optimizer)]
    return [*hooks, *types, vars(Optimizer)[SORT]]


def test_the_first_home_tensor_puts_patches_in_and_the_next_does_not_again() -> None:
    before = replaced()
    home()
    inside = replaced()
    assert [one - other for one, other in zip(inside[:2], before[:2], strict=True)] == [2, 1]
    assert inside[2:4] == [True, True]
    assert inside[4] is not before[4]
    home()
    assert replaced() == inside


def test_torch_is_as_it_was_once_they_are_out() -> None:
    before = replaced()
    home()
    remove_patches("torch")
    assert replaced() == before
    assert before[2:4] == [False, False]


def test_every_patch_of_torch_has_its_place_in_the_torch_that_is_installed() -> None:
    home()
    ours = [one for one in known_patches() if one.library == "torch"]
    assert len(ours) == 8
    assert {one for one in ours if one in patches._table.ways_back} == set(ours)
    assert all(patches._table.ways_back[one] is not patches._nothing for one in ours)


def test_an_optimizer_steps_on_home_tensors_after_patches_were_out() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    ours = home().requires_grad_()
    ours.grad = home()
    remove_patches("torch")
    install_patches("torch")
    for one in (parameter, ours):
        torch.optim.AdamW([one], lr=0.1, foreach=True).step()
    assert torch.equal(ours.to_local(), parameter.detach())


@pytest.mark.parametrize("is_needed", [True, False])
def test_what_a_version_lacks_is_refused_only_where_it_is_needed(
    is_needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches._table, "known", [])
    gone = Patch("torch", "torch.optim.optimizer", "Optimizer", "gone", "things fail", "2.13", str, is_needed=is_needed)
    register_patch(gone)
    if is_needed:
        with pytest.raises(EnvironmentProblem, match=r"has no torch.optim.optimizer.Optimizer.gone.*things fail"):
            install_patches("torch")
    else:
        install_patches("torch")


def test_attributes_of_modules_are_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_library")
    module.size = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(patches.sys.modules, "a_library", module)
    monkeypatch.setattr(patches._table, "known", [])
    register_patch(Patch("a_library", "a_library", "", "size", "it is too small", "1.0", lambda size: size + 1))
    install_patches("a_library")
    assert vars(module)["size"] == 2
    remove_patches("a_library")
    assert vars(module)["size"] == 1


def test_what_is_put_in_at_once_may_put_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches._table, "known", [])
    monkeypatch.setattr(patches._table, "lock", not_waited_for := _NotWaitedFor())
    handle, asked = SimpleNamespace(remove=lambda: None), list[str]()

    def register() -> Any:
        asked.append("once")
        install_patches("sys")
        return handle

    add_patch(Hook("sys", "sys", "hooks", "it is needed at once", "3.11", register))
    assert (asked, not_waited_for.is_held) == (["once"], False)
    remove_patches("sys")


class _NotWaitedFor:
    """A lock that refuses whoever would wait for itself."""

    is_held = False

    def __enter__(self) -> None:
        assert not self.is_held
        self.is_held = True

    def __exit__(self, *_: object) -> None:
        self.is_held = False
