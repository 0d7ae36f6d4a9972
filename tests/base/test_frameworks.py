"""What frameworks know comes by hooks: integrations fill them when one is first asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.base import frameworks
from hetu_fx.switching.sequences.form import SequenceOptions


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what a test registers."""
    monkeypatch.setattr(frameworks, "_known", {one.name: one for one in frameworks.frameworks()})


def test_importing_the_package_loads_no_integration() -> None:
    script = "import sys, hetu_fx; print([m for m in sys.modules if m.startswith(('torch', 'hetu_fx.integrations'))])"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_those_of_the_package_are_there_when_a_hook_is_asked() -> None:
    assert [one.name for one in frameworks.frameworks()] == ["accelerate", "transformers"]
    assert frameworks.weight_names().whole == "model.safetensors"
    assert [launcher.command for launcher in frameworks.launchers()] == ["torchrun", "accelerate launch"]
    assert SequenceOptions() == SequenceOptions(("labels",), "position_ids")


def test_another_framework_is_asked_too(registered: None, tmp_path: Path) -> None:
    def writer(model: nn.Module) -> Any:
        return (lambda folder: (folder / "own.txt").write_text("mine")) if hasattr(model, "own") else None

    assert frameworks.config_writer(nn.Linear(2, 2)) is None
    hetu_fx.register_framework(hetu_fx.Framework(name="zoo", config_writer=writer, positions="places"))
    model = nn.Linear(2, 2)
    model.own = True
    write = frameworks.config_writer(model)
    assert write is not None
    write(tmp_path)
    assert (tmp_path / "own.txt").read_text() == "mine"
    assert frameworks.position_input() == "position_ids"


def test_the_optimizer_inside_wrappers_is_found(registered: None) -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.inner = optimizer

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    hetu_fx.register_framework(
        hetu_fx.Framework(name="own", torch_optimizer=lambda given: getattr(given, "inner", given))
    )
    assert frameworks.torch_optimizer(Wrapper(optimizer)) is optimizer  # type: ignore[arg-type]
    assert frameworks.torch_optimizer(optimizer) is optimizer
