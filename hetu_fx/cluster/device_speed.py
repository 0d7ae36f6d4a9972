"""Measure what a device does alone: matrix products, memory that ops move, and what running an op takes besides.

Wall time, not CPU time: a device that waits for its quota is slow. Memory is told by ops as they stand between
products, some of which do little arithmetic and some much, as what limits them differs from device to device. What an
op takes besides is told by ops of a few numbers, forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from hetu_fx.base.device_types import device_type_record
from hetu_fx.base.low_dtypes import LOW_DTYPES


class Products:
    """Matrix products on a device, all of one size, in float32 if no other dtype is given."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device = torch.device(device)
        self._side = device_type_record(self.device).product_side
        self._a = torch.ones(self._side, self._side, device=self.device, dtype=dtype)
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
        device_type_record(self.device).synchronize(self.device)


def matmul_flops_per_second(device: str, seconds: float) -> float:
    """Return the FLOP/s of float32 matrix products over a window of wall time, after a warm-up.

    Wall time, not CPU time: a device that waits for its quota is slow. The warm-up of a fifth of the window
    also uses up what quota was saved before.
    """
    products = Products(device)
    return products.flops / _seconds_of(lambda: products.start(1), products.device, seconds)


def speedups(device: str, seconds: float) -> dict[str, float]:
    """Return for the low dtypes that a device computes in how much faster its products are, each timed so long."""
    kind = device_type_record(torch.device(device))
    known = {name: dtype for name in LOW_DTYPES if (dtype := getattr(torch, name)) not in kind.no_dtypes}
    taken = {name: _product_seconds(device, dtype, seconds) for name, dtype in known.items()}
    exact = _product_seconds(device, torch.float32, seconds)
    return {name: float(f"{exact / own:.3g}") for name, own in taken.items()}


def _product_seconds(device: str, dtype: torch.dtype, seconds: float) -> float:
    products = Products(device, dtype)
    return _seconds_of(lambda: products.start(1), products.device, seconds)


_MOVERS: tuple[tuple[Callable[[Tensor, Tensor], Tensor], int], ...] = (
    (lambda x, y: x + y, 3),
    (lambda x, _: torch.nn.functional.gelu(x), 2),
    (lambda x, _: torch.softmax(x, -1), 2),
)
"""Ops between products, and how often each moves a tensor: what it reads and what it writes."""


def memory_bytes_per_second(device: str, seconds: float) -> float:
    """Return the bytes per second that ops move over a window of wall time, after a warm-up."""
    place = torch.device(device)
    x, y = (torch.randn(device_type_record(place).large_elements >> 8, 1 << 8, device=place) for _ in range(2))

    def move() -> None:
        for op, _ in _MOVERS:
            op(x, y)

    moves = sum(count for _, count in _MOVERS)
    return moves * x.nbytes / _seconds_of(move, place, seconds)


_OPS = 300  # of a chain


def op_seconds(device: str, seconds: float) -> float:
    """Return what an op takes besides its work: a third of what it takes forward and backward, where nothing is moved.

    Two ops of the backward stand against one of the forward, as with products.
    """
    place = torch.device(device)

    def chain() -> None:
        y = x
        for _ in range(_OPS // 2):
            y = (y * x) + x
        y.sum().backward()
        x.grad = None

    with torch.inference_mode(False), torch.enable_grad():  # whatever surrounds the call
        x = torch.ones(16, device=place, requires_grad=True)
        return _seconds_of(chain, place, seconds) / _OPS / 3


def _seconds_of(work: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Return the mean wall seconds of some work over a window, after a warm-up.

    The warm-up of a fifth of the window also uses up what quota was saved before.
    """
    _repeat(work, device, seconds / 5)
    count, elapsed = _repeat(work, device, seconds)
    return elapsed / count


def _repeat(work: Callable[[], None], device: torch.device, seconds: float) -> tuple[int, float]:
    synchronize = device_type_record(device).synchronize
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or count == 0:
        work()
        synchronize(device)
        count += 1
    return count, elapsed
