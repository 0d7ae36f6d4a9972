"""A model trained under a plan as all ranks of one process, beside plain PyTorch on one device: what came of it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.check.verdict import TrialVerdict, judge
from hetu_fx.errors import CommError, HetuFxError
from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.graph_execution import GraphExecution

Batches = Sequence[Mapping[str, Tensor]]
HOW = Lockstep()
ROUNDINGS = 100
"""Of so many ulps of the inputs a plan's other sums may be: theirs are as many as the ops."""


class Kind(Enum):
    """What became of a model under a plan, from best to worst."""

    RIGHT = "right"
    REFUSED = "refused"
    CRASH = "crash"
    WRONG = "wrong"


Outcome = tuple[Kind, str]
"""A kind, and why it is not right."""


def trains(model: nn.Module, batches: Batches) -> bool:
    """Tell whether plain PyTorch trains a model, with numbers that are finite."""
    with quiet(), unwritten_is_nan():
        made = train_alone(model, [dict(batch) for batch in batches], HOW)
    gradients = [gradient for step in made.steps for gradient in step.gradients.values()]
    numbers = [*(step.loss for step in made.steps), *(float(x.abs().sum()) for x in (*gradients, *made.state.values()))]
    return bool(gradients) and all(map(math.isfinite, numbers))


def change_by_an_ulp(model: nn.Module, batches: Batches) -> float:
    """Return what plain PyTorch makes of inputs and weights an ulp off: the largest relative difference of anything.

    Programs are drawn in which large numbers cancel, or a softmax is all but one: they have fewer digits, or none.
    """
    generator = torch.Generator().manual_seed(0)

    def off(tensor: Tensor) -> Tensor:
        if not carries_gradient(tensor.dtype):
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return (tensor.detach() * (1 + noise * torch.finfo(tensor.dtype).eps)).to(tensor.dtype)

    moved, given = copy.deepcopy(model), [dict(batch) for batch in batches]
    for parameter in moved.parameters():
        parameter.data = off(parameter)
    others = [{name: off(tensor) for name, tensor in batch.items()} for batch in given]
    with quiet():
        verdict = judge("", train_alone(model, given, HOW), train_alone(moved, others, HOW), 0.0, "")
    return max(verdict.parameter_difference, *(step.most for step in verdict.steps))


class Trial:
    """A model that is captured once, and what one device makes of it.

    Raises whatever the capture, or hetu_fx on one device, raises.
    """

    def __init__(
        self, model: nn.Module, batches: Batches, tolerance: float, row_dims: Mapping[str, int | None] | None = None
    ) -> None:
        self._how = replace(HOW, row_dims=row_dims or {})
        self._model, self._batches, self._tolerance = model, [dict(batch) for batch in batches], tolerance
        with quiet():
            self.captured: GraphExecution = self._how.capture(model, copy.deepcopy(self._batches[0]))
            self._alone = self._expected()

    def _expected(self) -> Trained:
        """Return what plain PyTorch makes, but for models that draw random numbers: those are hetu_fx's own."""
        with _Draws() as draws:
            alone = train_alone(self._model, self._batches, HOW)
        return self._how.train(self._model, self._batches, Plan.single(), self.captured) if draws.any else alone

    def under(self, plan: Plan) -> Outcome:
        """Return what becomes of it under a plan."""
        with quiet():
            try:
                made = self._how.train(self._model, self._batches, plan, self.captured)
            except Exception as error:
                return raised(error)
        outcome = _judged(judge("", self._alone, made, self._tolerance, ""))
        if outcome[0] is Kind.WRONG and self._rounding > self._tolerance:
            return _judged(judge("", self._alone, made, self._rounding, ""))
        return outcome

    @cached_property
    def _rounding(self) -> float:
        """Return what rounding may come to: many times what an ulp of inputs and weights changes."""
        return ROUNDINGS * change_by_an_ulp(self._model, self._batches)


class _Draws(TorchDispatchMode):
    """Notes whether an op draws from torch's generator, be it seeded by the model itself."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an op, and run it."""
        self.any = self.any or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _judged(verdict: TrialVerdict) -> Outcome:
    if verdict.verdict == "equal":
        return Kind.RIGHT, ""
    worst = max(verdict.steps, key=lambda step: step.most)
    return Kind.WRONG, (
        f"loss {worst.loss_difference:.1e} off, gradient of {worst.worst_gradient} {worst.gradient_difference:.1e}, "
        f"{verdict.worst_parameter} {verdict.parameter_difference:.1e}"
    )


def raised(error: Exception) -> Outcome:
    """Return what an error is: ranks that go apart, or wait in vain, have refused nothing."""
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if isinstance(error, CommError):
        return Kind.WRONG, text
    return (Kind.REFUSED if isinstance(error, HetuFxError) else Kind.CRASH), text


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fill what is made without numbers with none, so that what depends on it is no model."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def quiet() -> Iterator[None]:
    """Let nobody be warned: the table says what is to be said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
