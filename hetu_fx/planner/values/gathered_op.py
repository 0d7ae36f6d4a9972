"""What is gathered because no rule splits it: a row for each op, which warnings, `explain()`, logs and reports show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.documents import nearest
from hetu_fx.base.records import Key, record
from hetu_fx.base.words import bytes_text, seconds_text, share_text
from hetu_fx.errors import StateError
from hetu_fx.show.table import table_text


@dataclass(frozen=True, slots=True)
class GatheredKind:
    """Why something is gathered.

    Attributes:
        why: what is said of the op in a warning.
        cure: what would avoid it.
        is_warned_of: whether the first step warns of it; of what has no rule, and of leaves, the capture does.
    """

    why: str
    cure: str
    is_warned_of: bool = True


_ALL = "needs all rows of the batch, which are gathered; every replica computes the whole"
_ALONE = "a plan with one pipeline has all rows in one place"
KINDS: Mapping[str, GatheredKind] = {
    "rows": GatheredKind(_ALL, f"a loss that is a sum or a mean over rows is not gathered; {_ALONE}"),
    "rows, no rule": GatheredKind(_ALL, f"if it works row by row, say so with hetu_fx.register_rule; {_ALONE}"),
    "leaf": GatheredKind(
        "is called as it is, and once more for its backward, on whole values, which are gathered; every device does so",
        "write it without reading values in Python, so that it can be captured",
        is_warned_of=False,
    ),
    "fixed batch": GatheredKind(
        "takes one batch size only: its inputs are gathered; every replica computes the whole",
        f"let the forward take any number of rows, as the warning of the capture says; {_ALONE}",
    ),
    "whole": GatheredKind(
        "needs whole what the plan splits, which is gathered",
        "let the plan split another dim, or use replicas or pipeline stages there",
        is_warned_of=False,
    ),
    "no rule": GatheredKind(
        "has no rule, and so needs whole what the plan splits, which is gathered",
        "tell how its dims relate with hetu_fx.register_rule",
        is_warned_of=False,
    ),
}
"""By the name that records have; a new kind of what is gathered is one more row."""


@dataclass(frozen=True, slots=True)
class GatheredOp:
    """An op for which something is gathered, and what that takes in a step, forward and backward.

    Attributes:
        kind: why it is gathered, one of `KINDS`.
        op: its name.
        line: the user's, "file.py:41".
        rows: of the step, over all replicas.
        num_bytes: what the device that sends most for it sends.
        path: of the module that it is in; "" of the model itself.
        source: the text of the line; "" where it is not known.
        seconds: what that takes; None where the devices are not known.
        repeated_seconds: what the op, and what is computed whole after it, takes longer than if each device had its
            share of it, on the device where that is most; None where the devices are not known.
        share: of the step's predicted seconds, that `seconds` are; None where nobody has predicted them.

    Raises:
        StateError: there is no such kind, or a number is negative or not finite.
    """

    kind: str
    op: str
    line: str
    rows: int
    num_bytes: float
    path: str = ""
    source: str = ""
    seconds: float | None = None
    repeated_seconds: float | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise StateError(f"there is no kind {self.kind!r} of what is gathered{nearest(self.kind, tuple(KINDS))}")
        numbers = {name: getattr(self, name) for name in ("num_bytes", "seconds", "repeated_seconds", "share")}
        known = {name: number for name, number in numbers.items() if number is not None}
        check_not_negative(StateError, f"gathered for {self.op}", **known)

    @property
    def cure(self) -> str:
        """Return what would avoid it."""
        return KINDS[self.kind].cure

    @property
    def where(self) -> str:
        """Return line, module and text: `loss.py:41, in head: return (u @ v.t()).exp()`."""
        module = f", in {self.path}" if self.path else ""
        return f"{self.line}{module}" + (f": {self.source}" if self.source else "")

    @property
    def cells(self) -> list[str]:
        """Return the cells of its row under `HEADER`."""
        times = ("" if one is None else seconds_text(one) for one in (self.seconds, self.repeated_seconds))
        moved, repeated = times
        share = "" if self.share is None else share_text(self.share)
        return [self.op, self.line, bytes_text(self.num_bytes), moved, share, repeated]

    def __str__(self) -> str:
        takes = "" if self.seconds is None else f", {seconds_text(self.seconds)}"
        again = f", {seconds_text(self.repeated_seconds)} more of work" if self.repeated_seconds else ""
        place = f" ({self.where})" if self.where else ""
        cost = f"{bytes_text(self.num_bytes)} in a step of {self.rows} rows{takes}{again}"
        return f"{self.op}{place} {KINDS[self.kind].why}: {cost}\nhint: {self.cure}"


HEADER = ("gathered for", "line", "sent", "time", "of step", "more work")
GATHERED_OP = record(
    GatheredOp,
    StateError,
    kind=Key(written="always"),
    num_bytes=Key(name="bytes", written="always"),
)


def gathered_text(found: Sequence[GatheredOp]) -> Iterator[str]:
    """Yield a table of what is gathered, the lines that ask for it and what would avoid it; nothing where nothing is.

    sent: by the device that sends most; time: of that, and its share of the predicted step; more work: what ops that
    run whole compute beside their shares.
    """
    if found:
        table = table_text(HEADER, [one.cells for one in found])
        yield f"gathered in a step of {found[0].rows} rows, as no rule splits it:\n{table}"
        yield from remarks(found)


def remarks(found: Sequence[GatheredOp]) -> Iterator[str]:
    """Yield the line of each op with its text and module, and what would avoid all of one kind; each once."""
    yield from dict.fromkeys(one.where for one in found if one.where != one.line)
    for kind in dict.fromkeys(one.kind for one in found):
        ops = dict.fromkeys(one.op for one in found if one.kind == kind)
        yield f"hint: {', '.join(ops)}: {KINDS[kind].cure}"
