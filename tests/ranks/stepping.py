"""A small model whose ranks watch each other, for tests of ranks that leave, stop, or cannot be reached."""

from __future__ import annotations

from typing import Any

WORLD = 2
BOUND = 5.0
"""Seconds that a rank waits for the others before it looks what has become of them."""


def watched() -> tuple[Any, Any]:
    """Return a model of `WORLD` ranks, and the input that it takes, once the job's variables are set."""
    import torch
    from torch import nn

    import hetu_fx

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(4, 4)
    model = hetu_fx.auto_parallelize(
        model,
        (x,),
        plan=hetu_fx.Plan.data_parallel(range(WORLD)),
        loss_fn=lambda output, input: output.pow(2).mean(),
        wait_seconds=BOUND,
    )
    return model, x
