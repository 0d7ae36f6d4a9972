"""What happens in a launched job, as lines of JSON in a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Writes events into a file, or nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", buffering=1)

    def say(self, event: str, at: float | None = None, **what: Any) -> None:
        """Write an event of now, or of `at` (time.monotonic)."""
        if self._file is not None:
            seconds = time.monotonic() if at is None else at
            self._file.write(json.dumps({"event": event, "seconds": seconds, **what}) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
