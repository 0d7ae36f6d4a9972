"""Judges one call in one way: every result and gradient against the reference, and what is allowed there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx_align.call import Call, coarsest
from hetu_fx_align.difference import Difference, difference, scale_of
from hetu_fx_align.run import Made, disturbed, first_line, reference_of, run_both_ways, run_in, up_cast, wider
from hetu_fx_align.tolerances import allowed, class_of, is_compared
from hetu_fx_align.way import Runner

RESPONSES = 2.0
"""So many times what a result changes by when the arguments are rounded is allowed, beside the class's tolerance."""

Kind = Literal["within", "differs", "fails"]
Tolerances = dict[str, float]
"""By op: a relative error that takes the place of the table's."""


@dataclass(frozen=True)
class Finding:
    """One tensor of a call beside its reference.

    Attributes:
        what: `result`, or `gradient of weight`.
        error: relative to the reference's norm.
        cosine: of the angle to the reference.
        allowed: error that is allowed.
    """

    what: str
    error: float
    cosine: float
    allowed: float

    @property
    def share(self) -> float:
        """Return the error relative to what is allowed; 0 for no error where none is allowed."""
        if not self.error:
            return 0.0
        return self.error / self.allowed if self.allowed else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values; an error that is infinite is null."""
        return {**asdict(self), "error": self.error if math.isfinite(self.error) else None}


@dataclass(frozen=True)
class Verdict:
    """How a call does in a way.

    Attributes:
        way: its name.
        verdict: `within` what is allowed, `differs`, or `fails` where the way cannot run it.
        findings: all that was compared, the worst first.
        says: why it fails, or what is to be known of the comparison.
    """

    way: str
    verdict: Kind
    findings: tuple[Finding, ...] = ()
    says: str = ""

    @property
    def worst(self) -> Finding | None:
        """Return the finding that is farthest beyond what is allowed."""
        return self.findings[0] if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values; an error that is infinite is null."""
        return {**asdict(self), "findings": [finding.to_json() for finding in self.findings]}


def judge(runner: Runner, call: Call, tolerances: Tolerances) -> tuple[Verdict, Made | None]:
    """Run a call in a way and judge it; returns what it made, too, None where it failed."""
    name = runner.way.name
    try:
        made = run_in(runner, call)
    except Exception as error:  # whatever an op raises in a way is what is to be told of it
        return Verdict(name, "fails", says=first_line(error)), None
    read = runner.way.adapt_call(call)
    try:
        reference, dtype = reference_of(read, made)
    except (NotImplementedError, RuntimeError) as error:
        return Verdict(name, "fails", says=f"the reference fails: {first_line(error)}"), made
    if len(reference.outputs) != len(made.outputs):
        return Verdict(name, "differs", says=f"makes {len(made.outputs)} tensors, not {len(reference.outputs)}"), made
    found = sorted(_findings(read, made, reference, dtype, tolerances), key=lambda one: one.share, reverse=True)
    is_within = all(one.error <= one.allowed for one in found)
    says = "" if dtype is torch.float64 else "the reference is in float32: the op has no float64"
    return Verdict(name, "within" if is_within else "differs", tuple(found), says), made


def _findings(call: Call, made: Made, reference: Made, dtype: torch.dtype, tolerances: Tolerances) -> Iterator[Finding]:
    kind, exact = class_of(call.op), coarsest((*call.tensors, *made.outputs))
    moved = _responses(call, made, dtype, torch.finfo(exact).eps)
    for pair in (*_results(call, made, reference, moved), *_gradients(call, made, reference, moved)):
        base = tolerances.get(call.name, allowed(kind, exact, backward=pair.is_gradient))
        found, response = pair.difference, 0.0 if pair.response is None else pair.response.error
        bound = base + RESPONSES * response if base and response < math.inf else base
        yield Finding(pair.what, found.error, found.cosine, bound)


@dataclass(frozen=True, eq=False)
class _Pair:
    """A tensor, its reference, what that is where arguments are rounded, and how large numbers beside it are."""

    what: str
    one: Tensor
    reference: Tensor
    moved: Tensor | None
    scale: float
    is_gradient: bool = False

    @property
    def difference(self) -> Difference:
        return difference(self.one, self.reference, self.scale)

    @property
    def response(self) -> Difference | None:
        return None if self.moved is None else difference(self.moved, self.reference, self.scale)


def _responses(call: Call, made: Made, dtype: torch.dtype, eps: float) -> Made | None:
    """Return what the reference comes to where its arguments are rounded; None where nothing is to be rounded."""
    if not any(carries_gradient(tensor.dtype) for tensor in call.tensors) or eps <= torch.finfo(torch.float64).eps:
        return None
    given = Made((), (), tuple(gradient.to("cpu", wider(gradient.dtype, dtype)) for gradient in made.cotangents))
    return run_both_ways(Call.run, *disturbed(up_cast(call, dtype), given, eps))


def _results(call: Call, made: Made, reference: Made, moved: Made | None) -> Iterator[_Pair]:
    scale, many = scale_of(reference.outputs), len(made.outputs) > 1
    beside = (None,) * len(made.outputs) if moved is None else moved.outputs
    for index, (one, right, near) in enumerate(zip(made.outputs, reference.outputs, beside, strict=True)):
        if is_compared(call.op, right):
            yield _Pair(f"result {index}" if many else "result", one, right, near, scale)


def _gradients(call: Call, made: Made, reference: Made, moved: Made | None) -> Iterator[_Pair]:
    """Yield the gradients that the reference has; one that a way does not make is zero."""
    there = [gradient for gradient in reference.gradients if gradient is not None]
    scale = scale_of((*there, *reference.cotangents))
    beside = (None,) * len(made.gradients) if moved is None else moved.gradients
    for name, one, right, near in zip(call.tensor_names, made.gradients, reference.gradients, beside, strict=True):
        if right is not None:
            yield _Pair(
                f"gradient of {name}", torch.zeros_like(right) if one is None else one, right, near, scale, True
            )
