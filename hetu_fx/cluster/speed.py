"""Matrix products: the work by which devices are measured.

Measure what a step takes on a device's host besides its work: small things, one after another.

Ranks agree on a batch, parameters and gradients go through hooks, results are handed out: thousands of calls that are
short on a fast host and long on a slow one, whatever the model. They are told by as many small ops.
"""

from __future__ import annotations

import time

import torch

_SIDE = {"cpu": 256, "cuda": 4096}  # of the matrices: about a millisecond of work


class Products:
    """Float32 matrix products on a device, all of one size."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._side = _SIDE[self.device.type]
        self._a = torch.ones(self._side, self._side, device=self.device)
        self._b, self._out = torch.ones_like(self._a), torch.empty_like(self._a)

    @property
    def flops(self) -> float:
        """Return the FLOPs of one product."""
        return 2.0 * self._side**3

    def start(self, count: int) -> None:
        """Do so many products, or put them on the device's stream."""
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._out)

    def finish(self) -> None:
        """Wait until they are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def matmul_flops_per_second(device: str, seconds: float) -> float:
    """Return the FLOP/s of float32 matrix products over a window of wall time, after a warm-up.

    Wall time, not CPU time: a device that waits for its quota is slow. The warm-up of a fifth of the window
    also uses up what quota was saved before.
    """
    products = Products(device)
    _repeat(products, seconds / 5)
    count, elapsed = _repeat(products, seconds)
    return products.flops * count / elapsed


def _repeat(products: Products, seconds: float) -> tuple[int, float]:
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or count == 0:
        products.start(1)
        products.finish()
        count += 1
    return count, elapsed


STEP_OPS = 5000
"""Small ops that take what a step takes besides: 20 ms of a core (`benchmarks.simulator`; steps of an idle rank)."""


def step_seconds(num_ops: int = STEP_OPS) -> float:
    """Return the wall seconds of so many small ops on the host, after as many that use up what quota was saved.

    Wall time, not CPU time: a host that waits for its quota is slow.
    """
    value = torch.zeros(16)
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(num_ops):
            value.add_(1.0)
    return time.perf_counter() - start
