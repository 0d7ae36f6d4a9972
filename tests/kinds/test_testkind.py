"""The tests' own type of devices computes real numbers, is another device than the host, and trains."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.kinds.testkind import PLACE, on_testkind


@on_testkind
def test_it_mixes_with_nothing_of_the_host_and_copies_are_copies() -> None:
    x = torch.ones(3, 2)
    there = x.to(PLACE)
    with pytest.raises(RuntimeError, match=r"same device|must be on"):
        there + x
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        there.numpy()
    there.add_(1.0)
    assert x.sum() == 6
    assert there.cpu().sum() == 12


@on_testkind
def test_views_share_memory_and_results_grow() -> None:
    x = torch.zeros(4, 3, device=PLACE)
    x[1:3].add_(1.0)
    x.t()[0].mul_(5.0)
    assert torch.equal(x.cpu(), torch.tensor([[0.0, 0, 0], [5, 1, 1], [5, 1, 1], [0, 0, 0]]))
    assert torch.add(x, x, out=torch.empty(0, device=PLACE)).shape == (4, 3)
    assert x.resize_(6, 3).shape == (6, 3)


@on_testkind
def test_a_training_has_the_numbers_of_the_host() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 8), nn.LayerNorm(8)
    models, x = [nn.Sequential(*layers).double()], torch.randn(4, 3, 8, 8, dtype=torch.float64)
    models.append(copy.deepcopy(models[0]).to(PLACE))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    losses = []
    for _ in range(3):
        for model, optimizer, given in zip(models, optimizers, (x, x.to(PLACE)), strict=True):
            loss = model(given).pow(2).mean() + model(given).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[1::2] == pytest.approx(losses[::2], rel=1e-12)
    assert next(models[1].parameters()).device == PLACE


@on_testkind
def test_its_backward_runs_in_a_thread_of_its_own_as_a_gpu_s_does() -> None:
    import threading

    seen = []
    x = torch.ones(2, device=PLACE, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(threading.get_ident()))
    y.sum().backward()
    assert seen
    assert seen[0] != threading.get_ident()
