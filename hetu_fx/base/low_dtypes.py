"""Dtypes in which devices multiply faster than in float32, by torch's names."""

from __future__ import annotations

LOW_DTYPES = ("bfloat16", "float16")
"""Those that cluster files tell of."""

STAGE_DTYPES = ("bfloat16",)
"""Those that a stage of a plan may compute in: gradients of float16 vanish without a scaler, and plans have none."""
