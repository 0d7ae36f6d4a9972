"""Pages that are made from the code: all errors, and what users expect."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from hetu_fx.errors import HetuFxError
from tests.docs.expectations import EXPECTATIONS

ERRORS_HEAD = """\
# Errors

Every error that hetu_fx raises on purpose derives from `hetu_fx.HetuFxError`; the classes are in `hetu_fx.errors`. A
message says what happened, where, and the values. A hint says what to do. If one rank fails, all do: the others raise
the same kind of error, with the first one's text.
"""
EXPECTATIONS_HEAD = """\
# What users expect

Users bring these expectations from torch, accelerate, Trainer and similar libraries. Each names what shows it: tests
(below `tests/`), a script of `python -m tests.scripts`, or a benchmark. Most tests show only the case that they name.
"Not yet" means that nothing shows it.
"""


def errors_page() -> str:
    """Return docs/errors.md: every class with what it is for and its ways out."""
    return "\n".join([ERRORS_HEAD, *(_section(error) for error in _kinds(HetuFxError))])


def _kinds(error: type[HetuFxError]) -> Iterator[type[HetuFxError]]:
    """Yield all classes of the package's errors below one, in the order of the file."""
    for kind in error.__subclasses__():
        if kind.__module__ == HetuFxError.__module__:
            yield kind
            yield from _kinds(kind)


def _section(error: type[HetuFxError]) -> str:
    base = error.__bases__[0]
    kind = "" if base is HetuFxError else f"*A `{base.__name__}`.* "
    return f"## {error.__name__}\n\n{kind}{inspect.getdoc(error)}\n"


def expectations_page() -> str:
    """Return docs/expectations.md."""
    rows = [
        f"| {number} | {wanted.says} | {'<br>'.join(map(_told, wanted.shown)) or 'not yet'} |"
        for number, wanted in enumerate(EXPECTATIONS, 1)
    ]
    shown = sum(bool(wanted.shown) for wanted in EXPECTATIONS)
    head = f"{EXPECTATIONS_HEAD}\n{shown} of {len(rows)} are shown.\n"
    return "\n".join([head, "| # | expectation | shown by |", "|---|---|---|", *rows, ""])


def _told(shown: str) -> str:
    kind, colon, name = shown.partition(": ")
    return f"{kind} `{name}`" if colon else f"`{shown}`"
