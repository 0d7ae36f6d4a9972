"""How long a row a parallel scheme can hold by the memory model that Hydraulis published, in bytes per device.

Profiles say what searches go by; this leads to the published strategies, which benchmarks and tests start from.

For L layers of hidden size H and a vocabulary of V, on a scheme of T-way tensor parallelism and P stages,
with the optimizer strategy O of D replicas:

    states(T, P)     = L/P  H^2/T  B + H V/T  E(P),  E(1) = 32, E(P > 1) = 16     (1)
    kept             = 3/4 states(T_O, P_O) / D + 1/4 states(T, P)                (2)
    activations(S)   = L  S H/T  A_T                                              (3)

(2): three quarters of the states (master copy and moments) stay in the optimizer strategy's layout, spread
over its replicas; one quarter (parameters and gradients of half the width) follows the scheme. (3) has L and
not L/P: the first stage of 1F1B keeps P micro-batches. What a device has, less a reserve and what the
runtime takes, bounds kept + activations, and thereby S, which is rounded down to whole blocks of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hetu_fx.base.checks import check_not_negative, check_positive
from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.scheme_costs import Scheme, TimeFit
from hetu_fx.planner.search.hydraulis.pool import ALIGNMENT

MOVED_SHARE = 0.25
"""The share of the states that follows the scheme; the rest stays where the optimizer is."""

_EMBEDDING_BYTES = {True: 32, False: 16}  # whether embedding and scores share a stage


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that bytes follow from."""

    layers: int
    hidden: int
    vocabulary: int

    def __post_init__(self) -> None:
        check_positive(PlanError, "model shape", layers=self.layers, hidden=self.hidden, vocabulary=self.vocabulary)


@dataclass(frozen=True, slots=True)
class OptimizerStrategy:
    """The optimizer strategy: `replicas` of one scheme, among which optimizer states are spread (ZeRO-1)."""

    replicas: int
    tensor_parallel: int
    stages: int

    def __post_init__(self) -> None:
        sizes = {"replicas": self.replicas, "tensor_parallel": self.tensor_parallel, "stages": self.stages}
        check_positive(PlanError, "optimizer strategy", **sizes)


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The constants of (1) to (3): B, A_T by tensor parallel degree, and the bytes of a device.

    `reserve_bytes` is kept free, `runtime_bytes` is what contexts and communicators take.
    """

    shape: ModelShape
    home: OptimizerStrategy
    state_bytes: float
    activation_bytes: Mapping[int, float]
    device_bytes: int
    reserve_bytes: int = 0
    runtime_bytes: int = 0

    def __post_init__(self) -> None:
        where = "memory model"
        check_positive(PlanError, where, state_bytes=self.state_bytes, device_bytes=self.device_bytes)
        check_not_negative(PlanError, where, reserve_bytes=self.reserve_bytes, runtime_bytes=self.runtime_bytes)
        by_degree = {f"[{tp}]": value for tp, value in self.activation_bytes.items()}
        check_positive(PlanError, "activation_bytes", **by_degree)

    def kept_bytes(self, tensor_parallel: int, stages: int) -> float:
        """Return (2), what a device holds whatever the batch."""
        home = self.home
        at_home = self._states(home.tensor_parallel, home.stages) / home.replicas
        return (1 - MOVED_SHARE) * at_home + MOVED_SHARE * self._states(tensor_parallel, stages)

    def bytes_per_token(self, tensor_parallel: int) -> float:
        """Return (3) for one token. Raises `PlanError` for a degree without constant."""
        if tensor_parallel not in self.activation_bytes:
            known = sorted(self.activation_bytes)
            raise PlanError(f"no activation_bytes for tensor parallel degree {tensor_parallel}; known are {known}")
        shape = self.shape
        return shape.layers * shape.hidden / tensor_parallel * self.activation_bytes[tensor_parallel]

    def max_length(self, tensor_parallel: int, stages: int) -> int:
        """Return the most tokens of a row, a multiple of `ALIGNMENT`; 0 when not even one block fits."""
        free = self.device_bytes - self.reserve_bytes - self.runtime_bytes - self.kept_bytes(tensor_parallel, stages)
        tokens = math.floor(free / self.bytes_per_token(tensor_parallel))
        return max(0, tokens // ALIGNMENT * ALIGNMENT)

    def _states(self, tensor_parallel: int, stages: int) -> float:
        shape = self.shape
        layers = shape.layers / stages * shape.hidden**2 / tensor_parallel * self.state_bytes
        return layers + shape.hidden * shape.vocabulary / tensor_parallel * _EMBEDDING_BYTES[stages == 1]


def fitting_schemes(
    times: Mapping[tuple[int, int], TimeFit], memory: MemoryModel, filling_tokens: Mapping[int, int] | None = None
) -> tuple[Scheme, ...]:
    """Return the schemes that hold at least one block of tokens.

    Args:
        times: the time fit by (tensor parallel degree, stages).
        memory: bounds the rows.
        filling_tokens: the shortest row that keeps the devices busy, by tensor parallel degree; left out: 1.
    """
    filling = filling_tokens or {}
    lengths = {key: memory.max_length(*key) for key in times}
    kept = [key for key in times if lengths[key]]
    return tuple(Scheme(*key, times[key], lengths[key], filling.get(key[0], 1)) for key in kept)
