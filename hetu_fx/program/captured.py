"""A captured program, what it depends on, and how a batch fits it; which captures are kept, and what leads to many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hetu_fx.base.user_warnings import warn_user
from hetu_fx.errors import BatchError
from hetu_fx.graph.bind import GivenBatch
from hetu_fx.graph.containers import passed_names
from hetu_fx.graph.example import order_in_memory
from hetu_fx.graph.tracing.autocasts import Autocasts
from hetu_fx.program.program import Bindings, Program
from hetu_fx.program.reads import Reads
from hetu_fx.program.structure import Structure, differences

MOST_CAPTURES = 32
"""That are kept: the one that has not been used for longest goes first."""

MANY = 8
"""Captures because of the same thing, of which a warning tells."""


@dataclass(frozen=True)
class CaptureEvent:
    """A capture of the model.

    Attributes:
        form: of the batch: mode, inputs, and what surrounds the call.
        why: what has changed since the last capture for this form; empty for the first.
        seconds: that it took.
    """

    form: str
    why: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class Captured:
    """A program, and what it depends on.

    Attributes:
        form: of the batches that it runs.
        program: the program.
        structure: of the model.
        reads: what the forward has read.
        constants: texts of the plain values of the batches, by name; of those that are passed on, of their classes.
        autocasts: that are written into it.
    """

    form: str
    program: Program
    structure: Structure
    reads: Reads
    constants: Mapping[str, str]
    autocasts: Autocasts

    @property
    def passed(self) -> frozenset[str]:
        """Return the names of plain values that the forward does not read."""
        return passed_names(self.program.graph.input_tree)

    def holds(self, structure: Structure) -> bool:
        """Tell whether the model is what it was, down to what its forward has read."""
        same = self.structure is structure or self.structure.key == structure.key
        return same and self.reads.hold()

    def changes(self, structure: Structure) -> tuple[str, ...]:
        """Say what is unlike what it was."""
        found = differences(self.structure.facts, structure.facts)
        found += differences(self.reads.facts, self.reads.facts_now)
        return found or ("a module, a hook or an object was replaced by one like it",)


@dataclass(frozen=True, eq=False)
class Match:
    """A batch, and the program that runs it.

    Attributes:
        program: the program.
        tensors: of the batch, by input name.
        rows: of the batch.
        bindings: what the symbols of the program's sizes stand for.
        signature: equal on ranks whose batches are alike, and whose models consist of the same.
        given: the batch, if it has plain values; these are told in messages.
        notes: what readers have found out of it that holds for all batches of its form and sizes, by what it is.
    """

    program: Program
    tensors: Mapping[str, Tensor]
    rows: int
    bindings: Bindings
    signature: str
    given: GivenBatch | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def plain_facts(self) -> Mapping[str, str]:
        """Return the plain values of the batch by what they are of; of those that are passed on, their classes."""
        return {} if self.given is None else self.given.plain_facts(passed_names(self.program.graph.input_tree))


Sizes = tuple[int, Bindings]
Form = Callable[[frozenset[str]], str]
"""Gives the form of a batch, for programs that do not read plain values of these names."""


def batch_sizes(program: Program, given: GivenBatch) -> Sizes | str:
    """Return the rows of a batch, and what symbols stand for; else which size of it the program does not take.

    Raises:
        BatchError: inputs have different numbers of rows, which no program takes.
    """
    rows, layout = program.num_rows(given.tensors), program.graph.layout
    if layout is not None:
        others = (name for name, order in layout.orders.items() if order_in_memory(given.tensors[name]) != order)
        if (name := next(others, None)) is not None:
            return f"the forward asks how its inputs lie in memory ({layout.line}), and dims of {name!r} lie otherwise"
    try:
        return rows, program.bind(given.tensors)
    except BatchError as error:
        return str(error)


class KeptCaptures(list[Captured]):
    """Captures, the last used one first."""

    def of_form(self, form: Form) -> list[Captured]:
        """Return those for batches of a form."""
        forms = {passed: form(passed) for passed in {one.passed for one in self}}
        return [one for one in self if one.form == forms[one.passed]]

    def use(self, captured: Captured) -> None:
        """Know that this one, which may be a new one, is used now."""
        if self[:1] != [captured]:
            self[:] = [captured, *(one for one in self if one is not captured)][:MOST_CAPTURES]


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
                warn_user(
                    f"the model has been captured {self._counts[label]} times because of {label} ({how}, at last; that "
                    f"took {seconds:.1f} s), and the {MOST_CAPTURES} captures that were used last are kept\n"
                    f"hint: make a tensor of what changes often: a buffer that the script writes in place, or an "
                    f"input. Pad sizes to one of a few",
                )
