"""What is replaced in other libraries is listed, was tested with what is installed, and can be put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import accelerate.local_sgd
import pytest
import transformers.trainer_seq2seq  # noqa: F401  (so that its patch is put in)
import trl.trainer.sft_trainer  # noqa: F401  (likewise)
from accelerate import Accelerator
from torch import nn

from hetu_fx.base import patches as table
from hetu_fx.base.frameworks import frameworks
from hetu_fx.errors import EnvironmentProblem, StateError
from hetu_fx.integrations import Patch, patches, unpatch


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    unpatch()
    yield
    unpatch()


def listed() -> list[Patch]:
    return [patch for patch in patches() if isinstance(patch, Patch) and patch.library != "torch"]


def found(patch: Patch) -> Any:
    module = import_module(patch.module)
    return vars(getattr(module, patch.owner) if patch.owner else module)[patch.name]


def meet_a_model() -> None:
    for framework in frameworks():
        framework.adopt(nn.Linear(2, 2))


def numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")[:2]]


def test_every_patch_is_listed_with_its_reason_and_a_version_not_after_what_is_installed() -> None:
    assert {f"{patch.owner}.{patch.name}" for patch in listed()} == {
        "Accelerator.prepare_model", "Accelerator.prepare", "Trainer.prediction_step", "Seq2SeqTrainer.prediction_step",
        "Trainer._get_num_items_in_batch", "Trainer.compute_loss", "LocalSGD.__enter__", ".safe_save_file",
        "SFTTrainer.compute_loss", "SFTTrainer.prediction_step", "Accelerator.save_model", "Accelerator.save_state",
    }  # fmt: skip
    for patch in patches():
        tested, installed = numbers(patch.tested), numbers(version(patch.library))
        assert tested <= installed < [tested[0] + 1], f"{patch}: {installed} is installed"
        assert patch.why in str(patch)


def test_patches_are_in_once_there_is_a_model_and_the_originals_come_back() -> None:
    before = [found(patch) for patch in listed()]
    for _ in range(2):
        meet_a_model()
        inside = [found(patch) for patch in listed()]
        assert not any(one is other for one, other in zip(before, inside, strict=True))
        meet_a_model()
        assert all(one is found(patch) for one, patch in zip(inside, listed(), strict=True))
        unpatch()
        assert all(one is found(patch) for one, patch in zip(before, listed(), strict=True))


def test_nothing_is_loaded_for_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Accelerator.prepare_model
    monkeypatch.delitem(sys.modules, "transformers.trainer")
    meet_a_model()
    assert "transformers.trainer" not in sys.modules
    assert Accelerator.prepare_model is not before


def test_a_version_without_the_attribute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Patch("accelerate", "accelerate.accelerator", "Accelerator", "gone", "things fail", "1.15", lambda was: was)
    monkeypatch.setattr(table._table, "known", [gone])
    with pytest.raises(EnvironmentProblem, match=r"has no accelerate.accelerator.Accelerator.gone.*things fail"):
        meet_a_model()


def test_local_models_are_refused_where_the_model_is_parallel() -> None:
    meet_a_model()
    model = nn.Linear(2, 2)
    with accelerate.local_sgd.LocalSGD(Accelerator(cpu=True), model, 2, enabled=False):
        pass
    local = accelerate.local_sgd.LocalSGD(Accelerator(cpu=True), model, 2, enabled=False)
    local.enabled, local.model, model.hetu = True, model, None
    with pytest.raises(StateError, match="leave LocalSGD out, or pass enabled=False"):
        local.__enter__()
