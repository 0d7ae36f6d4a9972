"""Gradients that are kept back under no_sync: shown at once, brought home when someone reads them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.switching.runtime import Runtime
from tests.switching.in_threads import as_two_ranks, runtime_of


def pair(table: GroupTable) -> tuple[nn.Module, Runtime, nn.Module, Tensor]:
    torch.manual_seed(0)
    plain, x = nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
    runtime = runtime_of(table, copy.deepcopy(plain), (x,))
    return plain, runtime, runtime.model, x


def backward(model: nn.Module | Runtime, x: Tensor) -> None:
    made: Tensor = model.run((x,), {}) if isinstance(model, Runtime) else model(x)
    made.pow(2).sum().backward()


def is_kept(tensor: Tensor) -> bool:
    return "local" not in tensor.__dict__


@as_two_ranks
def test_kept_gradients_are_shown_and_come_home_when_they_are_read(table: GroupTable) -> None:
    plain, runtime, parallel, x = pair(table)
    backward(plain, x)
    with runtime.no_sync():
        backward(runtime, x)
    assert "not here yet" in repr(parallel.weight.grad)
    assert is_kept(parallel.weight.grad)
    torch.testing.assert_close(parallel.weight.grad.full_tensor(), plain.weight.grad)
    assert not is_kept(parallel.bias.grad)


@as_two_ranks
def test_the_next_step_brings_home_what_was_kept(table: GroupTable) -> None:
    plain, runtime, parallel, x = pair(table)
    for model in (plain, runtime):
        backward(model, x)
    with runtime.no_sync():
        backward(runtime, x)
    backward(runtime, x)
    for _ in range(2):
        backward(plain, x)
    torch.testing.assert_close(parallel.weight.grad.full_tensor(), plain.weight.grad)


@as_two_ranks
def test_what_was_cleared_is_forgotten(table: GroupTable) -> None:
    plain, runtime, parallel, x = pair(table)
    with runtime.no_sync():
        backward(runtime, x)
    parallel.weight.grad = None
    backward(runtime, x)
    backward(plain, x)
    torch.testing.assert_close(parallel.weight.grad.full_tensor(), plain.weight.grad)
    torch.testing.assert_close(parallel.bias.grad.full_tensor(), 2 * plain.bias.grad)


@as_two_ranks
def test_gradients_that_are_taken_by_themselves_do_not_mix_with_kept_ones(table: GroupTable) -> None:
    plain, runtime, parallel, x = pair(table)
    with runtime.no_sync():
        backward(runtime, x)
        found = torch.autograd.grad(runtime.run((x,), {}).pow(2).sum(), parallel.weight)[0]
    backward(plain, x)
    torch.testing.assert_close(found.full_tensor(), plain.weight.grad)
    torch.testing.assert_close(parallel.weight.grad.full_tensor(), plain.weight.grad)
