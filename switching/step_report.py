"""What a step leaves behind: for statistics, and for the caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hetu_fx.switching.sequences.planner import Planned
from hetu_fx.switching.step.execution import Work
from hetu_fx.switching.step.timer import ComputeTimer


@dataclass
class StepReport:
    """What the last step did: for `model.hetu.stats`; `planned` and `work` if sequences had lengths of their own."""

    variant: str = ""
    rows: tuple[int, ...] = ()
    timer: ComputeTimer = field(default_factory=ComputeTimer)
    planned: Planned | None = None
    work: Work | None = None


class LossAndOutput(NamedTuple):
    """What a model with a loss_fn returns: the loss, and the model's own output (None where it is not asked for)."""

    loss: torch.Tensor | None
    output: Any
