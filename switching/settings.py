"""How the user wants a model to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetu_fx.comm_ops.wire.common_path import WAIT_SECONDS
from hetu_fx.errors import StateError

IDLE_BYTES = 1 << 30
"""What variants that do not run may keep on a rank, if nobody says otherwise."""


@dataclass(frozen=True)
class Settings:
    """How the user wants the model to run.

    Attributes:
        shared: every rank passes the same whole batch (`data="global"`); otherwise each its own rows.
        outputs: "auto" (other outputs than the loss in evaluation only), "all" or "loss".
        seed: of all random numbers that the model draws.
        idle_bytes: what variants that do not run may keep on a rank.
        homes_follow: parameters' homes follow plans that are made for the devices' rates.
        wait_seconds: for which a rank waits for one that is elsewhere.
        health: by which a device counts as slow, and as healthy again: `threshold`, `hysteresis`, `window` and others.
    """

    shared: bool
    outputs: str
    seed: int | None
    idle_bytes: int = IDLE_BYTES
    homes_follow: bool = True
    wait_seconds: float = WAIT_SECONDS
    health: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.idle_bytes < 0:
            raise StateError(f"idle_bytes is {self.idle_bytes}; give 0 (variants that do not run keep nothing) or more")
