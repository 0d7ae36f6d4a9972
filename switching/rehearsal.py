"""A step whose results are thrown away: it makes process groups, compiled code and memory pools ahead of training.

Hydraulis runs every strategy once before it measures, for the same reasons (its artifact's warm-up).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.switching.graph_variant import GraphVariant
from hetu_fx.switching.home.buffers import Buffers
from hetu_fx.switching.step.execution import StepInputs, StepOutputs
from hetu_fx.switching.step.gradients import KeptBack
from hetu_fx.switching.step.loss import Guess


class ReadOnly(Buffers):
    """Buffers that a rehearsal reads, and does not write."""

    def write(self, updates: Mapping[str, Tensor], annotations: Mapping[str, Annotation]) -> None:
        """Leave the model's buffers as they are."""


def rehearse(variant: GraphVariant, inputs: StepInputs, run: Callable[[GraphVariant, StepInputs], StepOutputs]) -> None:
    """Run a step forward and backward, and leave the model as it is; collective.

    Gradients go to stand-ins of the home parameters, so that neither `.grad` nor hooks of the user's see them.
    """
    stand_in = copy.copy(variant)
    stand_in.homes = {name: _twin(home) for name, home in variant.homes.items()}
    stand_in.kept_back = KeptBack()
    buffers = ReadOnly(inputs.buffers.model, inputs.buffers.table)
    devices = [variant.device] if variant.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        made = run(stand_in, replace(inputs, buffers=buffers, guess=Guess(), syncs_gradients=True))
        ends = list(_differentiable(pytree.tree_leaves(made.output) if made.loss is None else [made.loss]))
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


def _twin(home: nn.Parameter) -> nn.Parameter:
    twin: nn.Parameter = home.detach().requires_grad_(home.requires_grad)  # type: ignore[assignment]
    return twin


def _differentiable(values: Iterable[object]) -> Iterable[Tensor]:
    return (value for value in values if isinstance(value, Tensor) and value.requires_grad)
