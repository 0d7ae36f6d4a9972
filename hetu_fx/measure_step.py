"""Measure what a step takes on a device's host besides its work: small things, one after another.

Ranks agree on a batch, parameters and gradients go through hooks, results are handed out: thousands of calls that are
short on a fast host and long on a slow one, whatever the model. They are told by as many small ops.
"""

from __future__ import annotations

import time

STEP_OPS = 5000
"""Small ops that take what a step takes besides: 20 ms of a core (`benchmarks.simulator`; steps of an idle rank)."""


def step_seconds(num_ops: int = STEP_OPS) -> float:
    """Return the wall seconds of so many small ops on the host, after as many that use up what quota was saved.

    Wall time, not CPU time: a host that waits for its quota is slow.
    """
    import torch

    value = torch.zeros(16)
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(num_ops):
            value.add_(1.0)
    return time.perf_counter() - start
