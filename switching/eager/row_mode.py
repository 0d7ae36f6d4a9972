"""Which rows a replica runs of a module that runs as it is: its own where that is known to be right, or all rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowMode:
    """How replicas share a batch.

    Attributes:
        by_rows: each runs its own share of the rows; else each runs all rows, which is right for any module.
        adds_up: the loss is a sum over rows, which ranks share out as DistributedDataParallel does; else, by rows, a
            mean over them.
        why: why replicas run all rows; empty if `by_rows`.
    """

    by_rows: bool
    adds_up: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        assert self.by_rows != bool(self.why), "a reason is given for running all rows"


BY_ROWS = RowMode(by_rows=True)
NOT_KNOWN = RowMode(
    by_rows=False,
    why="nobody has tried whether it works row by row (check=True tries it, check=False says that it does)",
)
