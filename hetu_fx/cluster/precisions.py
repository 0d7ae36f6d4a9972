"""Which low dtypes a kind of devices computes in, and how much faster its matrix products are in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from hetu_fx.base.checks import check_positive, standing_twice
from hetu_fx.base.documents import nearest
from hetu_fx.base.low_dtypes import LOW_DTYPES
from hetu_fx.base.records import record
from hetu_fx.cluster.devices import Device
from hetu_fx.errors import ClusterError

HEADER = ("kind", "dtype", "products")


@dataclass(frozen=True, slots=True)
class Precision:
    """Matrix products of a `kind` in `dtype` are `speedup` times as fast as `flops_per_second` says of its devices."""

    kind: str
    dtype: str
    speedup: float

    def __post_init__(self) -> None:
        where = f"precision of {self.kind!r}"
        if self.dtype not in LOW_DTYPES:
            raise ClusterError(f"{where} has dtype {self.dtype!r}{nearest(self.dtype, LOW_DTYPES)}")
        check_positive(ClusterError, where, speedup=self.speedup)


PRECISION = record(Precision, ClusterError)


def by_kind(precisions: Sequence[Precision]) -> dict[tuple[str, str], float]:
    """Return speedups by (kind, dtype); raises `ClusterError` where one stands twice."""
    if twice := standing_twice((one.kind, one.dtype) for one in precisions):
        raise ClusterError(f"precisions of (kind, dtype) {twice} stand twice\nhint: give each once")
    return {(one.kind, one.dtype): one.speedup for one in precisions}


def with_faster_products(device: Device, speedup: float) -> Device:
    """Return a device whose products are so much faster, and which moves its memory as before."""
    if speedup == 1.0:
        return device
    memory = device.flops_per_second / device.flops_per_byte
    return replace(device, flops_per_second=device.flops_per_second * speedup, memory_bytes_per_second=memory)


def fastest_in_common(
    kinds: Sequence[str], dtypes: Sequence[str], known: Mapping[tuple[str, str], float]
) -> str | None:
    """Return the dtype in which the one of some kinds that gains least gains most; None: float32.

    In a dtype that nobody has timed on one of them, they are not known to compute.
    """
    gains = {dtype: min(known.get((kind, dtype), 0.0) for kind in kinds) for dtype in dtypes}
    best = max(gains, key=lambda dtype: (gains[dtype], dtype), default=None)
    return best if best is not None and gains[best] > 1.0 else None


def merge_precisions(kinds: Sequence[str], found: Sequence[Mapping[str, float]]) -> tuple[Precision, ...]:
    """Return what each rank has found of its kind, in the median of those of a kind."""
    taken: dict[tuple[str, str], list[float]] = {}
    for kind, speedups in zip(kinds, found, strict=True):
        for dtype, speedup in speedups.items():
            taken.setdefault((kind, dtype), []).append(speedup)
    return tuple(Precision(*key, median(values)) for key, values in sorted(taken.items()))


def precision_table(precisions: Sequence[Precision]) -> list[list[str]]:
    """Return the cells of the table."""
    return [[one.kind, one.dtype, f"{one.speedup:.3g} x float32"] for one in precisions]
