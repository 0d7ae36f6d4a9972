"""Whether two trainings lose alike: the mean relative error of their losses (H2's end-to-end criterion)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetu_fx.base.documents import MOST_BYTES, open_regular, parse_json, read_json
from hetu_fx.errors import AlignError
from hetu_fx.report.read import read_log

LIMIT = 0.015
"""H2 calls a chip precise enough where the loss of some hundred steps is within 1.5 % of a reference's, in the mean."""

STEPS = 300


@dataclass(frozen=True)
class LossVerdict:
    """How the losses of a training compare with those of a reference.

    Attributes:
        steps: that were compared.
        mean_relative_error: over the steps.
        worst_step: whose relative error is largest, from 1.
        worst_relative_error: of that step.
        limit: of the mean.
    """

    steps: int
    mean_relative_error: float
    worst_step: int
    worst_relative_error: float
    limit: float

    @property
    def is_alike(self) -> bool:
        """Tell whether the mean is within its limit."""
        return self.mean_relative_error < self.limit

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "alike": self.is_alike}


def compare_losses(
    losses: Sequence[float], reference: Sequence[float], *, limit: float = LIMIT, steps: int = STEPS
) -> LossVerdict:
    """Compare the first `steps` losses of a training with those of a reference.

    A loss that is not finite where the reference's is counts as infinitely far off.

    Raises:
        AlignError: one of the two has fewer steps, or a loss of the reference is zero or not finite.
    """
    for name, given in (("the training", losses), ("the reference", reference)):
        if len(given) < steps:
            raise AlignError(
                f"{name} has {len(given)} losses, but {steps} are compared\nhint: train longer, or set --steps"
            )
    errors = [_relative_error(step, *pair) for step, pair in enumerate(zip(losses, reference, strict=False), 1)][:steps]
    worst = max(range(steps), key=errors.__getitem__)
    return LossVerdict(steps, sum(errors) / steps, worst + 1, errors[worst], limit)


def _relative_error(step: int, loss: float, reference: float) -> float:
    if not math.isfinite(reference) or not reference:
        raise AlignError(
            f"the reference's loss of step {step} is {reference}\nhint: compare with a training that has losses"
        )
    return abs(loss - reference) / abs(reference) if math.isfinite(loss) else math.inf


def read_losses(path: Path) -> tuple[float, ...]:
    """Read losses: a JSON list of numbers, or a log of a run.

    Raises:
        AlignError: the file is neither.
        EnvironmentProblem, StateError: it is a log that cannot be read.
    """
    if not path.is_file():
        raise AlignError(f"there is no file {path}\nhint: give a JSON list of losses, or what model.hetu.log wrote")
    if _is_log(path):
        return tuple(_told(path, entry.get("loss")) for entry in read_log(path) if entry["event"] == "step")
    found = read_json(path, AlignError)
    if not isinstance(found, list):
        raise AlignError(
            f"{path} has no list of losses\nhint: give a JSON list of numbers, or what model.hetu.log wrote"
        )
    return tuple(_told(path, loss) for loss in found)


def _is_log(path: Path) -> bool:
    """Tell whether the first line of a file is an entry of a log."""
    with open_regular(path, AlignError) as file:
        first = file.readline(MOST_BYTES >> 4)  # a longer one is no entry, but may be a list
    try:
        entry = parse_json(first, str(path), AlignError, constants=True)
    except AlignError:
        return False
    return isinstance(entry, dict) and "event" in entry


def _told(path: Path, loss: Any) -> float:
    if isinstance(loss, bool) or not isinstance(loss, (int, float)):
        raise AlignError(f"{path}: a loss is {json.dumps(loss, default=str)}; every step must have a number")
    return float(loss)
