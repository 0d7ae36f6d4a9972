"""Every test here draws the same random numbers in every run; models of the zoo in float64 are captured once."""

from __future__ import annotations

import pytest
import torch

from tests.transforms.cases import Case


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def losses_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers compute losses in `.float()`, whose rounding would hide differences."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(scope="session")
def llama() -> Case:
    return Case("llama")


@pytest.fixture(scope="session")
def gpt2() -> Case:
    return Case("gpt2")


@pytest.fixture(scope="session")
def bert() -> Case:
    return Case("bert")


@pytest.fixture(scope="session")
def vit() -> Case:
    return Case("vit")


@pytest.fixture(scope="session")
def t5() -> Case:
    return Case("t5")
