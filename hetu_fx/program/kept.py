"""The captures of a model that are kept, and what leads to one after another of them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator

from hetu_fx.program.captured import Captured
from hetu_fx.program.program import Program

MOST_CAPTURES = 32
"""That are kept: the one that has not been used for longest goes first."""

MANY = 8
"""Captures because of the same thing, of which a warning tells."""


class KeptCaptures:
    """Captures, the last used one first."""

    def __init__(self) -> None:
        self._by_program: dict[Program, Captured] = {}  # the last used one last
        self._by_form: dict[str, list[Captured]] = {}  # the last used one first

    def __iter__(self) -> Iterator[Captured]:
        return reversed(self._by_program.values())

    def of_form(self, form: str) -> list[Captured]:
        """Return those for batches of a form."""
        return self._by_form.get(form, [])

    def of_program(self, program: Program) -> Captured | None:
        """Return the capture that made a program, unless it is gone."""
        return self._by_program.get(program)

    def use(self, captured: Captured) -> None:
        """Know that this one, which may be a new one, is used now."""
        if next(iter(self), None) is captured:
            return
        self._forget(captured)
        self._by_program[captured.program] = captured
        self._by_form.setdefault(captured.form, []).insert(0, captured)
        if len(self._by_program) > MOST_CAPTURES:
            self._forget(next(iter(self._by_program.values())))

    def _forget(self, captured: Captured) -> None:
        if self._by_program.pop(captured.program, None) is not None:
            alike = self._by_form[captured.form]
            alike.remove(captured)
            if not alike:
                del self._by_form[captured.form]


class Recurring:
    """Counts what has led to captures, and warns once of what does again and again."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._is_told = False

    def note(self, changes: Iterable[str], seconds: float) -> None:
        """Take in why a model was captured: "what: how it has changed" each; and the seconds that it took."""
        for label, _, how in (change.partition(": ") for change in changes):
            self._counts[label] += 1
            if self._counts[label] >= MANY and not self._is_told:
                self._is_told = True
                warnings.warn(
                    f"the model has been captured {self._counts[label]} times because of {label} ({how}, at last; that "
                    f"took {seconds:.1f} s), and the {MOST_CAPTURES} captures that were used last are kept. What "
                    f"changes often should be a tensor: a buffer of the model that the script writes in place, or an "
                    f"input; sizes should be padded to one of a few",
                    stacklevel=2,
                )
