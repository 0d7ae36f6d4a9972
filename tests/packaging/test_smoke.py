"""The installed hetu_fx captures and steps under the installed torch, and gives what plain PyTorch gives.

Needs nothing but the package, torch and pytest, so that `make smoke` and `make package` run it in environments of their
own, outside of the repository. Ranks are threads of this process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx import Pipeline, Plan, Stage
from hetu_fx.lockstep import Lockstep, train_alone

STEPS, ROWS, TOKENS, WIDTH, WORDS = 3, 6, 5, 8, 11
ADAMW = {"lr": 0.01}


class Mlp(nn.Module):
    """Two layers and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


class Block(nn.Module):
    """Attention and a feed-forward layer, before norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        heads = self.attention(self.norms[0](x)).view(rows, tokens, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class Transformer(nn.Module):
    """Two blocks over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def mlp() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = Mlp().double()
    batches = [(torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.randint(4, (ROWS,))) for _ in range(STEPS)]
    return model, [{"x": x, "labels": labels} for x, labels in batches]


def transformer() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = Transformer().double()
    batches = [(torch.randint(WORDS, (ROWS, TOKENS)), torch.randint(WORDS, (ROWS, TOKENS))) for _ in range(STEPS)]
    return model, [{"tokens": tokens, "labels": labels} for tokens, labels in batches]


PLANS = {
    "unequal data parallel": Plan.data_parallel([0, 1], [2, 1]),
    "tensor parallel": Plan.tensor_parallel([0, 1]),
    "pipeline": Plan((Pipeline((Stage((0,), blocks=1), Stage((1,), blocks=1)), micro_batches=2),)),
}


def step_by_step(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for batch in batches:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(autouse=True)
def quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETU_FX_PROGRESS", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("make", [mlp, transformer])
def test_one_process_trains_as_plain_pytorch_does(make: Callable[[], Any]) -> None:
    model, batches = make()
    plain = copy.deepcopy(model)
    expected = step_by_step(plain, batches)
    model = hetu_fx.auto_parallelize(model, batches[0])
    assert step_by_step(model, batches) == pytest.approx(expected, rel=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), plain.get_parameter(name).detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_train_as_one_device_does(name: str) -> None:
    model, batches = transformer()
    how = Lockstep(lambda parameters: torch.optim.AdamW(parameters, **ADAMW), ranks=2)
    expected = train_alone(model, batches, how)
    found = how.train(model, batches, PLANS[name])
    assert [one.loss for one in found.steps] == pytest.approx([one.loss for one in expected.steps], rel=1e-10)
    for key, tensor in expected.state.items():
        torch.testing.assert_close(found.state[key], tensor, rtol=1e-9, atol=1e-11)


def test_a_step_through_autograds_own_compiler_is_the_same() -> None:
    model, batches = mlp()
    expected = step_by_step(copy.deepcopy(model), batches[:1])
    model = hetu_fx.auto_parallelize(model, batches[0], compile="aot_eager")
    assert step_by_step(model, batches[:1]) == pytest.approx(expected, rel=1e-10)
