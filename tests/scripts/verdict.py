"""What came of a script: right, refused by name, or one of the ways that must not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """What came of a script in one setting, and why."""

    kind: Kind
    why: str = ""
    seconds: float = 0.0


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
    for rank, outcome in outcomes.items():
        assert isinstance(outcome, Returned)
        why = difference(expected.results, outcome.results, script.tolerance)
        if why:
            return Verdict(Kind.DIFFERENT, f"rank {rank}: {why}")
    return Verdict(Kind.RIGHT)


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
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        if any(isinstance(value, str) for value in expected):
            return "" if list(expected) == list(found) else f"{found!r}, on one device {expected!r}"
        expected, found = (torch.tensor(list(values), dtype=torch.float64) for values in (expected, found))
        return _far(expected, found, tolerance)
    if isinstance(expected, float | Tensor) and isinstance(found, float | Tensor):
        return _far(torch.as_tensor(expected), torch.as_tensor(found), tolerance)
    return "" if expected == found else f"{found!r}, on one device {expected!r}"


def _far(expected: Tensor, found: Tensor, tolerance: float) -> str:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{found.dtype}{list(found.shape)}, on one device {expected.dtype}{list(expected.shape)}"
    expected, found = expected.double(), found.double()
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    # NaN where the plain script has NaN is right.
    far = ~torch.isclose(found, expected, rtol=0, atol=tolerance * max(scale, 1e-30), equal_nan=True)
    if not far.any():
        return ""
    worst = float((found - expected).abs().max())
    return f"off by {worst:.3g} where the largest value is {scale:.3g}"
