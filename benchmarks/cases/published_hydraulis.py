"""What Hydraulis published: Llama 32B on A800, and the pool of its case study on 64 of them.

Seconds come in milliseconds, by (tensor parallel degree, stages), as published. Benchmarks and tests share this.
"""

from __future__ import annotations

from hetu_fx.planner.dispatch.scheme_costs import Strategy, TimeFit
from tests.oracles.hydraulis_memory import MemoryModel, ModelShape, OptimizerStrategy, fitting_schemes

MIB = 1 << 20

FITS = {
    (1, 2): (0.0, 4.8989e-1, 22.88),
    (1, 4): (9.392e-7, 2.1260e-1, 35.99),
    (2, 1): (2.9746e-5, 3.8696e-1, 156.2),
    (2, 2): (3.7342e-6, 2.1306e-1, 80.72),
    (2, 4): (1.9703e-6, 1.0656e-1, 42.94),
    (2, 6): (1.3161e-6, 7.1805e-2, 28.62),
    (4, 1): (3.8695e-6, 2.3900e-1, 120.7),
    (4, 2): (2.0456e-6, 1.1830e-1, 65.42),
    (4, 4): (1.0578e-6, 5.9212e-2, 35.34),
    (4, 6): (7.030e-7, 3.9851e-2, 24.07),
    (8, 1): (2.1255e-6, 1.4141e-1, 122.9),
    (8, 2): (1.0679e-6, 7.1058e-2, 61.77),
    (8, 3): (6.855e-7, 4.8275e-2, 38.07),
    (8, 4): (4.911e-7, 3.7080e-2, 25.44),
    (16, 1): (1.3778e-6, 1.0244e-1, 145.7),
}

TIMES = {key: TimeFit(*(constant / 1e3 for constant in constants)) for key, constants in FITS.items()}

MEMORY = MemoryModel(
    shape=ModelShape(layers=60, hidden=6656, vocabulary=30592),
    home=OptimizerStrategy(replicas=4, tensor_parallel=16, stages=1),
    state_bytes=201,
    activation_bytes={1: 36, 2: 36, 4: 37, 8: 42, 16: 50},
    device_bytes=81252 * MIB,
    reserve_bytes=10 * 1024 * MIB,
    runtime_bytes=5000 * MIB,
)

FILLING_TOKENS = {1: 384, 2: 512, 4: 768, 8: 1024, 16: 1280}

SCHEMES = {(s.tensor_parallel, s.stages): s for s in fitting_schemes(TIMES, MEMORY, FILLING_TOKENS)}


def strategy(*parts: tuple[int, tuple[int, int]]) -> Strategy:
    """Build a strategy from `(pipelines, (tensor parallel degree, stages))`."""
    return Strategy(tuple(SCHEMES[key] for count, key in parts for _ in range(count)))


POOL = (
    strategy((4, (16, 1))),
    strategy((1, (16, 1)), (2, (8, 3))),
    strategy((1, (16, 1)), (6, (8, 1))),
    strategy((1, (16, 1)), (12, (4, 1))),
    strategy((1, (8, 3)), (10, (4, 1))),
    strategy((1, (8, 1)), (14, (4, 1))),
    strategy((8, (4, 2))),
)

LARGE = (strategy((64, (16, 1))), strategy((1, (16, 1)), (3, (8, 1)), (238, (4, 1)), (2, (4, 4))))
"""What Hydraulis proposed for 1,024 devices."""
