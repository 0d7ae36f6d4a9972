"""What a kind of files is, and what is promised of one that is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Promise(Enum):
    """What a reader gives of a broken file, where it raises no error of ours."""

    TRUE_VALUES = "the true values: the files have sums"
    FINITE = "numbers that are finite: the files are written by people, too"
    ANYTHING = "what stands there"


def nothing() -> None:
    """Return the state of what holds none."""


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    Attributes:
        write: makes a good set in a folder, with values that its number says (0, 1).
        read: reads what is in the folder of a set, and returns what it has found as JSON values.
        state: returns what must be as it was after an error.
        promise: of what is read where there is no error.
        instead: what may be gone, each with all that comes before it, so that what is read is something else that is
            whole, and as good: patterns of paths.
        seal: makes sums right after a fault, so that what is behind them is reached; None: they are as they were.
        writes: it may change the set: it is a writer, too.
    """

    write: Callable[[Path, int], None]
    read: Callable[[Path], Any]
    state: Callable[[], Any] = nothing
    promise: Promise = Promise.TRUE_VALUES
    instead: tuple[str, ...] = ()
    seal: Callable[[Path], None] | None = None
    writes: bool = False
