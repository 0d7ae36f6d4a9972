"""Gradients of a step: handed on as they arrive, and nothing of the step outlives it."""

from __future__ import annotations

import weakref

import torch
from torch import nn

import hetu_fx


def parallel() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 3), (torch.randn(5, 4),)
    plan = hetu_fx.Plan.single(0)
    return hetu_fx.auto_parallelize(model, batch, plan=plan, loss_fn=lambda output, input: output.pow(2).mean()), batch


def leaf_of(loss: torch.Tensor) -> torch.Tensor:
    """Find a compute parameter behind a loss."""
    queue = [loss.grad_fn]
    while queue:
        node = queue.pop(0)
        variable = getattr(node, "variable", None)
        if variable is not None and type(variable) is torch.Tensor:
            return variable
        inner = [piece.grad_fn for piece in node.step.pieces] if hasattr(node, "step") else []
        queue += [following for following in (*inner, *(f for f, _ in node.next_functions)) if following is not None]
    raise AssertionError("no leaf")


def test_parameters_of_a_step_go_with_its_loss() -> None:
    model, batch = parallel()
    loss = model(*batch).loss
    leaf = weakref.ref(leaf_of(loss))
    loss.backward()
    del loss
    assert leaf() is None


def test_parameters_of_a_step_go_without_a_backward_too() -> None:
    model, batch = parallel()
    loss = model(*batch).loss
    leaf = weakref.ref(leaf_of(loss))
    del loss
    assert leaf() is None
