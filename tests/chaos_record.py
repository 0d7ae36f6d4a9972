"""What a run has written of itself: what its launcher saw, and what its script did."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any


class ChaosError(Exception):
    """The run did what it must not, or nothing could be done to it."""


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when (time.monotonic) the network was not as it should be."""

    begin: float
    end: float

    def meets(self, begin: float, end: float) -> bool:
        """Tell whether it has a moment in common with this time."""
        return self.begin <= end and begin <= self.end


class Lines:
    """A file of JSON lines that grows."""

    def __init__(self, path: Path) -> None:
        self.path, self._rest, self._at, self._read = path, b"", 0, list[dict[str, Any]]()

    def __call__(self) -> list[dict[str, Any]]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
            self._at += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            self._read += map(json.loads, lines)
        return self._read


class Record:
    """Reads the files of a run. `bad_network` is when its network was slow, or passed nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events, self.progress = Lines(folder / "events.jsonl"), Lines(folder / "progress.jsonl")
        self.bad_network: list[Span] = []

    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "start"]

    def lost(self, workers: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Return what is told of lost processes: of these, or of all."""
        lost = [event for event in self.events() if event["event"] == "lost"]
        return [event for event in lost if not workers or event["worker"] in workers]

    def steps(self, after: float = 0.0) -> list[dict[str, Any]]:
        return self.told("step", after)

    def told(self, what: str, after: float) -> list[dict[str, Any]]:
        """Return the lines of the script that tell of something."""
        lines = self.progress()
        return [line for line in lines[bisect_right(lines, after, key=itemgetter("seconds")) :] if what in line]
