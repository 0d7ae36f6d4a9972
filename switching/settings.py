"""How the user wants a model to run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hetu_fx.base.documents import nearest
from hetu_fx.comm_ops.wire.common_path import patience
from hetu_fx.errors import StateError
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides

IDLE_BYTES = 1 << 30
"""What variants that do not run may keep on a rank, if nobody says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What few scripts need to say: `hetu_fx.auto_parallelize(..., options=hetu_fx.Options(...))`.

    Attributes:
        warm: make every variant ready before the first step, as `model.hetu.warm(batch)` does; else a variant's graphs
            are made inside the first step that it runs.
        idle_bytes: what variants that do not run may keep on a rank, graphs and copies of parameters (1 GiB). Anything
            above is evicted, what was used longest ago first, and made again when it is needed.
        homes_follow: where devices become slow, or recover, and another plan takes over, the parameters and the
            optimizer's state change their owners too if that pays; `optimizer` must be known. False: they stay.
        health: when a device counts as slow: `threshold` (0.25: from a quarter slower than normal), `hysteresis` (0.1:
            so far below it that counts as healthy again), `window` (5 steps that a rate is the median of), `patience`
            (2 steps that a shift must last), and others of `hetu_fx.switching.adapt.health.HealthTracker`.
        wait_seconds: how long a rank waits in a call for another one that is elsewhere: in the script's own code, in
            another call, or gone. After that all raise a DivergedError that says where each of them is. One that is at
            work inside hetu_fx (it captures, compiles, computes) is waited for. None: HETU_FX_WAIT_SECONDS in the
            environment, or 60; math.inf: as long as process groups wait.
        align: which ops run in a wider dtype ("up-cast") or on the host ("on host"): the path of a file that
            `hetu-fx-align --overrides` wrote, or what it says.
        cuda_graphs: record what a GPU computes in a step, from its fourth call with the same sizes on, and replay it:
            the host then starts it by a call for the forward and one for the backward. For stages that neither
            communicate nor draw random numbers amid their ops; others run as without it, and a warning says why. Takes
            memory for one step's activations, and a copy of the gradients, for as long as the record is kept.
    """

    warm: bool = False
    idle_bytes: int = IDLE_BYTES
    homes_follow: bool = True
    health: Mapping[str, float] = field(default_factory=dict)
    wait_seconds: float | None = None
    align: OpOverrides | str | Path | None = None
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "health", dict(self.health))
        patience(self.wait_seconds)
        for name in ("warm", "homes_follow", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise StateError(f"Options: {name} is {getattr(self, name)!r}\nhint: give True or False")
        if self.idle_bytes < 0:
            raise StateError(
                f"idle_bytes is {self.idle_bytes}\nhint: give 0 (variants that do not run keep nothing) or more"
            )

    @property
    def patience_seconds(self) -> float:
        """Return how long a rank waits for another one: as given, else as the environment says, else 60 s."""
        return patience(self.wait_seconds)

    @classmethod
    def given(cls, options: Options | None, old: Mapping[str, Any]) -> Options:
        """Return the options that were given, with those that were given as arguments, as they were before: a warning.

        Raises:
            TypeError: an argument was never one.
            StateError: `options` are none.
        """
        known = [one.name for one in fields(cls)]
        for name in old:
            if name not in known:
                raise TypeError(f"auto_parallelize() got an unexpected keyword argument {name!r}{nearest(name, known)}")
            warnings.warn(f"{name}=... is options=hetu_fx.Options({name}=...) now", DeprecationWarning, stacklevel=3)
        if not isinstance(options, Options | None):
            raise StateError(f"options is {options!r}\nhint: give hetu_fx.Options(...)")
        return replace(options or cls(), **{name: value for name, value in old.items() if (name, value) != _NO_HEALTH})


_NO_HEALTH = ("health", None)  # as it was said before


@dataclass(frozen=True)
class Settings:
    """How the user wants the model to run.

    Attributes:
        shared: every rank passes the same whole batch (`data="global"`); otherwise each its own rows.
        outputs: "auto" (other outputs than the loss in evaluation only), "all" or "loss".
        seed: of all random numbers that the model draws.
        options: all else.
    """

    shared: bool
    outputs: str
    seed: int | None
    options: Options = field(default_factory=Options)
