"""accelerate leaves a parallel model alone, and its optimizer is found inside its wrapper."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from hetu_fx.integrations.accelerate import mark_prepared, torch_optimizer


def test_prepare_leaves_a_marked_model_and_the_wrapped_optimizer_is_found() -> None:
    model = nn.Linear(2, 2)
    mark_prepared(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, wrapped = Accelerator(cpu=True).prepare(model, optimizer)
    assert prepared is model
    assert wrapped is not optimizer
    assert torch_optimizer(wrapped) is optimizer
    assert torch_optimizer(optimizer) is optimizer
