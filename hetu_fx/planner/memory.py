"""Bytes that a device holds during a step, by term.

For a device with parameter bytes P (its shard of its stage), n replicas, micro-batches of x rows of which f
are in flight, and A activation bytes per row:

    parameters = P                                                            (1)
    gradients  = P                                                            (2)
    optimizer  = 2 P               zero 0 or n = 1: two moments               (3a)
               = 3 P / n           zero 1: its part of master copy and moments (3b)
    activations = f x A                                                       (4)

1F1B keeps f = min(m, p - s) micro-batches of m on stage s of p, GPipe all m.
"""

from __future__ import annotations

import math

from hetu_fx.plans import Schedule

UNBOUNDED = 1 << 40
"""More rows than any batch has."""

Terms = tuple[tuple[str, int], ...]


def in_flight(schedule: Schedule, stage: int, num_stages: int, micro_batches: int) -> int:
    """Return how many micro-batches a stage keeps activations of, f in (4)."""
    return micro_batches if schedule == "gpipe" else min(micro_batches, num_stages - stage)


def fixed_bytes(parameters: float, *, zero: int, num_replicas: int) -> Terms:
    """Return (1), (2) and (3) of a device with so many parameter bytes."""
    optimizer = 3 * parameters / num_replicas if zero and num_replicas > 1 else 2 * parameters
    pairs = (("parameters", parameters), ("gradients", parameters), ("optimizer", optimizer))
    return tuple((term, math.ceil(count)) for term, count in pairs)


def activation_bytes(bytes_per_row: float, rows: int, num_in_flight: int) -> int:
    """Return (4) for micro-batches of `rows` rows."""
    return math.ceil(num_in_flight * rows * bytes_per_row)


def most_rows(limit: float, fixed: float, bytes_per_row: float, num_in_flight: int) -> int:
    """Return the most rows of a micro-batch for which all terms stay within the limit; 0 when none do."""
    left = limit - fixed
    if left < 0:
        return 0
    per_row = num_in_flight * bytes_per_row
    return int(left / per_row) if per_row else UNBOUNDED
