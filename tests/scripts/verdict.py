"""What came of a script: right, refused by name, or one of the ways that must not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tests.scripts.script import Script


class Kind(Enum):
    """Kinds of verdict; the first two are good ones."""

    RIGHT = "right"
    REFUSED = "refused"
    DIFFERENT = "DIFFERENT"
    CRASH = "CRASH"
    HANG = "HANG"


@dataclass(frozen=True)
class Verdict:
    """What came of a script in one setting.

    Attributes:
        kind: of what came of it.
        why: it is not right; "" where it is.
        seconds: that the ranks took.
        differences: of what is right: the largest of each result, relative to its largest value.
    """

    kind: Kind
    why: str = ""
    seconds: float = 0.0
    differences: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Returned:
    """A rank's results."""

    results: Mapping[str, Any]


@dataclass(frozen=True)
class Raised:
    """A rank's error: whether it is a HetuFxError, its text, and where it was raised."""

    by_name: bool
    text: str
    where: str


Outcome = Returned | Raised


def judge(script: Script, expected: Outcome, outcomes: Mapping[int, Outcome], world: int) -> Verdict:
    """Compare what the ranks made of a script with what one device has made of it."""
    if len(outcomes) < world:
        missing = sorted(set(range(world)) - outcomes.keys())
        heard = "; ".join(f"rank {rank} {_told(outcome)}" for rank, outcome in outcomes.items())
        return Verdict(Kind.HANG, f"ranks {missing} said nothing within {script.seconds:.0f} s; {heard}")
    raised = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Raised)}
    for rank, error in raised.items():
        if not error.by_name:
            return Verdict(Kind.CRASH, f"rank {rank} {_told(error)}")
    if raised:
        return _refused(script, raised, world)
    if isinstance(expected, Raised):
        return Verdict(Kind.DIFFERENT, f"one device {_told(expected)}")
    differences = dict.fromkeys(expected.results, 0.0)
    for rank, outcome in outcomes.items():
        assert isinstance(outcome, Returned)
        why = difference(expected.results, outcome.results, script.tolerance)
        if why:
            return Verdict(Kind.DIFFERENT, f"rank {rank}: {why}")
        for name, value in expected.results.items():
            differences[name] = max(differences[name], _off(value, outcome.results[name]))
    return Verdict(Kind.RIGHT, differences=differences)


def _refused(script: Script, raised: Mapping[int, Raised], world: int) -> Verdict:
    first = next(iter(raised.values()))
    if len(raised) < world:
        return Verdict(Kind.CRASH, f"refused on ranks {sorted(raised)} only: {first.text}")
    unlike = next((error for error in raised.values() if script.refused not in error.text), None)
    if unlike is not None:
        return Verdict(Kind.CRASH, f"refused, but by another text than {script.refused!r}: {unlike.text}")
    return Verdict(Kind.REFUSED, first.text)


def is_expected(script: Script, verdict: Verdict) -> bool:
    """Tell whether a script came out as its entry says; what is refused somewhere may be right elsewhere."""
    return verdict.kind is Kind.RIGHT or (verdict.kind is Kind.REFUSED and bool(script.refused))


def _told(outcome: Outcome) -> str:
    if isinstance(outcome, Returned):
        return "returned"
    return f"raised {outcome.text} ({outcome.where})"


def difference(expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float) -> str:
    """Return the first difference between results; "" where there is none."""
    if expected.keys() != found.keys():
        return f"results {sorted(expected.keys() ^ found.keys())} are on one side only"
    for name, value in expected.items():
        why = _differs(value, found[name], tolerance)
        if why:
            return f"{name}: {why}"
    return ""


def _differs(expected: Any, found: Any, tolerance: float) -> str:
    one, other = _numbers(expected), _numbers(found)
    if one is None or other is None:
        return "" if expected == found else f"{found!r}, on one device {expected!r}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{other.dtype}{list(other.shape)}, on one device {one.dtype}{list(one.shape)}"
    # NaN where the plain script has NaN is right.
    one, other, scale = one.double(), other.double(), _scale(one)
    far = ~torch.isclose(other, one, rtol=0, atol=tolerance * scale, equal_nan=True)
    if not far.any():
        return ""
    return f"off by {float((other - one).abs().max()):.3g} where the largest value is {scale:.3g}"


def _off(expected: Any, found: Any) -> float:
    """Return the largest difference of numbers, relative to the largest of them; 0 for what is none."""
    one, other = _numbers(expected), _numbers(found)
    if one is None or other is None or not one.numel():
        return 0.0
    return float((other.double() - one.double()).abs().nan_to_num(0.0).max()) / _scale(one)


def _numbers(value: Any) -> Tensor | None:
    """Return numbers as a tensor; None for what is none."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return None if any(isinstance(item, str) for item in value) else torch.tensor(list(value), dtype=torch.float64)
    return torch.as_tensor(value) if isinstance(value, float | Tensor) else None


def _scale(numbers: Tensor) -> float:
    return max(float(numbers.double().abs().max()) if numbers.numel() else 0.0, 1e-30)
