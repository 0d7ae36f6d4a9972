"""Whether two trainings are the same: relative differences, the worst of them by name, and a judgement."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from hetu_fx.base.dtypes import as_reals
from hetu_fx.lockstep import Step, Tensors, Trained

NEGLIGIBLE = 1e-6
"""Tensors are compared relative to their norm, or to so much of the largest norm: some gradients are zero but for
rounding."""


@dataclass(frozen=True)
class StepDifference:
    """A step beside that of one device; differences are relative."""

    step: int
    loss_on_one_device: float
    loss: float
    loss_difference: float
    worst_gradient: str
    gradient_difference: float

    @property
    def most(self) -> float:
        """Return the larger difference."""
        return max(self.loss_difference, self.gradient_difference)


@dataclass(frozen=True)
class TrialVerdict:
    """What became of a plan: `says` has the reason of a refusal, or what the comparison was with."""

    plan: str
    verdict: Literal["equal", "differs", "refused"]
    says: str = ""
    steps: tuple[StepDifference, ...] = ()
    worst_parameter: str = ""
    parameter_difference: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return asdict(self)


def judge(plan: str, alone: Trained, made: Trained, tolerance: float, says: str) -> TrialVerdict:
    """Compare a training under a plan with that of one device."""
    steps = tuple(_step(number, *pair) for number, pair in enumerate(zip(alone.steps, made.steps, strict=True), 1))
    name, difference = worst(alone.state, made.state)
    is_equal = all(most <= tolerance for most in (difference, *(step.most for step in steps)))
    return TrialVerdict(plan, "equal" if is_equal else "differs", says, steps, name, difference)


def _step(number: int, alone: Step, made: Step) -> StepDifference:
    difference = abs(alone.loss - made.loss) / max(abs(alone.loss), 1e-300)
    return StepDifference(number, alone.loss, made.loss, difference, *worst(alone.gradients, made.gradients))


def worst(alone: Tensors, made: Tensors) -> tuple[str, float]:
    """Return the tensor that differs most, and its difference relative to its norm; see `differences`."""
    return max(differences(alone, made).items(), key=lambda entry: entry[1], default=("", 0.0))


def differences(alone: Tensors, made: Tensors, negligible: float = NEGLIGIBLE) -> dict[str, float]:
    """Return by how much each tensor differs, relative to its norm; what only one side has is 0.

    Or relative to the `negligible` share of the largest norm, if that is more. What has no numbers where the other side
    has differs infinitely.
    """
    norms = {name: _norm(tensor) for name, tensor in alone.items()}
    floor = max(negligible * max(norms.values(), default=0.0), 1e-300)
    apart = {name: _apart(alone.get(name), made.get(name)) for name in {**alone, **made}}
    relative = {name: distance / max(norms.get(name, 0.0), floor) for name, distance in apart.items()}
    return {name: math.inf if math.isnan(difference) else difference for name, difference in relative.items()}


def _apart(a: Tensor | None, b: Tensor | None) -> float:
    """Return the norm of a difference, in which what is missing is zero."""
    if a is None or b is None:
        there = a if b is None else b
        return 0.0 if there is None else _norm(there)
    return _norm(as_reals(a).double() - as_reals(b).double())


def _norm(tensor: Tensor) -> float:
    return float(as_reals(tensor).double().norm())
