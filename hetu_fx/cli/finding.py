"""What a check of `hetu-fx doctor` comes to, and how findings are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["fine", "doubtful", "wrong"]
_MARKS: dict[State, str] = {"fine": "ok   ", "doubtful": "?    ", "wrong": "WRONG"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: how it is, and a hint where it is not as it should be."""

    what: str
    state: State
    says: str
    way_out: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        line = f"{_MARKS[self.state]} {self.what}: {self.says}"
        return f"{line}\n      -> {self.way_out}" if self.way_out else line


def make_finding(what: str, says: str, *, wrong: str = "", doubtful: str = "") -> Finding:
    """Return a finding that is fine, unless there is a hint for it."""
    state: State = "wrong" if wrong else "doubtful" if doubtful else "fine"
    return Finding(what, state, says, wrong or doubtful)


def conclusion(findings: Sequence[Finding]) -> str:
    """Say in one line what the findings come to."""
    wrong, doubtful = (sum(finding.state == state for finding in findings) for state in ("wrong", "doubtful"))
    if wrong or doubtful:
        return f"{wrong} wrong, {doubtful} doubtful, of {len(findings)}"
    return f"all {len(findings)} are fine"
