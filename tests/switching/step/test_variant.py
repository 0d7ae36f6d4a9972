"""Gradients that are kept back under no_sync: shown at once, brought home when someone reads them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import hetu_fx


def pair() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    plain, x = nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
    parallel = hetu_fx.auto_parallelize(copy.deepcopy(plain), (x,), plan=hetu_fx.Plan.single(0))
    return plain, parallel, x


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).pow(2).sum().backward()


def is_kept(tensor: Tensor) -> bool:
    return "local" not in tensor.__dict__


def test_kept_gradients_are_shown_and_come_home_when_they_are_read() -> None:
    plain, parallel, x = pair()
    backward(plain, x)
    with parallel.no_sync():
        backward(parallel, x)
    assert "not here yet" in repr(parallel.weight.grad)
    assert is_kept(parallel.weight.grad)
    torch.testing.assert_close(parallel.weight.grad.full_tensor(), plain.weight.grad)
    assert not is_kept(parallel.bias.grad)


def test_the_next_step_brings_home_what_was_kept() -> None:
    plain, parallel, x = pair()
    for model in (plain, parallel):
        backward(model, x)
    with parallel.no_sync():
        backward(parallel, x)
    backward(parallel, x)
    for _ in range(2):
        backward(plain, x)
    torch.testing.assert_close(parallel.weight.grad.full_tensor(), plain.weight.grad)


def test_what_was_cleared_is_forgotten() -> None:
    plain, parallel, x = pair()
    with parallel.no_sync():
        backward(parallel, x)
    parallel.weight.grad = None
    backward(parallel, x)
    backward(plain, x)
    torch.testing.assert_close(parallel.weight.grad.full_tensor(), plain.weight.grad)
    torch.testing.assert_close(parallel.bias.grad.full_tensor(), 2 * plain.bias.grad)


def test_gradients_that_are_taken_by_themselves_do_not_mix_with_kept_ones() -> None:
    plain, parallel, x = pair()
    with parallel.no_sync():
        backward(parallel, x)
        found = torch.autograd.grad(parallel(x).pow(2).sum(), parallel.weight)[0]
    backward(plain, x)
    torch.testing.assert_close(found.full_tensor(), plain.weight.grad)
    torch.testing.assert_close(parallel.weight.grad.full_tensor(), plain.weight.grad)
