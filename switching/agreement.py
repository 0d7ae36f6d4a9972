"""The first act of a step: each rank reads its batch, and all agree on what it is, or refuse it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from hetu_fx.comm_ops.wire.consensus import LocalFacts, StepFacts, agree, any_rank, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.switching.home.writes import Writes
from hetu_fx.switching.members import MemberWatch
from hetu_fx.switching.settings import Settings
from hetu_fx.switching.step.execution import Execution, Reading
from hetu_fx.switching.step.same_inputs import SameInputs


class Watcher(Protocol):
    """Goes along with a run: before every step it tells the other ranks something, and hears what all have told."""

    def tell(self) -> Mapping[str, float]:
        """Return facts of this rank, by their names in `StepFacts`."""

    def observe(self, facts: StepFacts) -> None:
        """Take in what all ranks have agreed on; on all ranks in the same order, so that it may be collective."""


class Agreement:
    """Reads batches, and agrees with all ranks on each.

    Args:
        writes: what tells whether scripts have written alike on all ranks.
        members: what tells whether scripts have made others of the model's parameters and buffers.
        own_seconds: returns what the last step took on this rank, by the names in `StepFacts`.

    Attributes:
        watchers: tell the other ranks something beside the facts of each batch, in this order.
    """

    def __init__(
        self,
        model: nn.Module,
        table: GroupTable,
        execution: Execution[Any],
        settings: Settings,
        writes: Writes,
        members: MemberWatch,
        own_seconds: Callable[[], Mapping[str, float]],
    ) -> None:
        self._model, self._table, self._execution, self._settings = model, table, execution, settings
        self._writes, self._members, self._own_seconds = writes, members, own_seconds
        self._same_inputs = SameInputs(table, shared=settings.shared)
        self.watchers: list[Watcher] = []

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Reading[Any], StepFacts, bool]:
        """Return the batch, ready to run, what ranks agree on, and whether the model has other members; collective.

        It is read once more where what was found does not hold for all rows together. An error on one rank is raised
        on all.
        """
        shared = self._settings.shared
        read = partial(self._execution.read, args, kwargs, self._model.training, shared=shared)
        batch, facts, changed = self._agree_on(read, of_own_rows=True)
        if facts.is_asked_alone:
            return batch, facts, False
        rows = batch.facts.rows if shared else sum(facts.rows)
        if rows and not self._takes(batch, facts, rows):  # what has no rows is refused by what runs it
            batch, facts, changed = self._agree_on(partial(batch.of_rows, rows), of_own_rows=False)
        return *self._filled(batch, facts), changed

    def _takes(self, batch: Reading[Any], facts: StepFacts, rows: int) -> bool:
        """Tell whether what ranks have found is one, and holds for all rows together; alike on all ranks."""
        if facts.has_unlike_graphs:
            return False
        takes = batch.takes(rows)
        return not any_rank(self._table, [not takes])[0] if facts.asks_rows else takes

    def _agree_on(self, read: Callable[[], Reading[Any]], *, of_own_rows: bool) -> tuple[Reading[Any], StepFacts, bool]:
        """Return the batch, what ranks agree on, and whether the script has made others of the model's members."""
        batch: Reading[Any] | None = None
        local: LocalFacts | Exception
        told: dict[str, float] = {"asks": not torch.is_grad_enabled()}
        try:
            batch = read()
            told |= {**self._own_seconds(), **self._writes.told}
            same = partial(batch.same_inputs, shared=self._settings.shared)
            told["inputs"] = self._same_inputs.told(batch.facts.shown, same)
            for watcher in tuple(self.watchers):
                told.update(watcher.tell())
            changed = self._members.look(self._execution.structure)
            local = self._with_members(batch.facts)
        except Exception as error:  # whatever it is, the others must not wait for this rank
            local = error
        facts = agree(self._table, local, told, takes_unlike_graphs=of_own_rows)
        assert batch is not None
        if not facts.is_asked_alone:
            self._writes.check(facts)
        return batch, facts, changed

    def _filled(self, batch: Reading[Any], facts: StepFacts) -> tuple[Reading[Any], StepFacts]:
        """Return what ranks have agreed on, filled up to the sizes of all; collective."""
        shared = self._settings.shared
        self._same_inputs.check(facts, batch.facts.shown, partial(batch.same_inputs, shared=shared))
        if shared:
            facts = replace(facts, counts=batch.facts.counts)
        fill = partial(batch.filled, facts, self._settings.outputs)
        if facts.unequal_sizes:  # ranks may have found unlike programs for theirs, of which one does not hold for all
            batch = raise_on_all_ranks(self._table, fill)
        elif facts.sizes != batch.facts.sizes:
            batch = fill()
        return batch, facts

    def _with_members(self, facts: LocalFacts) -> LocalFacts:
        """Return facts with how often parameters or buffers have become others, which all ranks must have alike."""
        count = self._members.count
        return replace(facts, signature=f"{facts.signature}, other members {count} times") if count else facts
