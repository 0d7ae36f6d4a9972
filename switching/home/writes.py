"""The script's writes to parameters, and to what belongs to them: alike on all ranks, or the ranks are told."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hetu_fx.comm_ops.wire.consensus import LocalFacts, StepFacts, agree, of_all
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.home.journal import journal
from hetu_fx.switching.home.noted import Numbers, StepRates, TensorCounts
from hetu_fx.switching.home.parameters import Buffers
from hetu_fx.switching.home.watch import Watch
from hetu_fx.switching.home.watches import (
    BufferCounts,
    BufferValues,
    GradientsFromOutside,
    ParameterCounts,
    ParameterValues,
)

_BITS = (1 << 48) - 1  # of a number that float64 carries exactly


class Writes:
    """What this rank has written to home parameters, and to what belongs to them, since they were made.

    Args:
        table: the ranks, which all make this together.
        homes: the home parameters by name.
        buffers: of the model.
    """

    def __init__(self, table: GroupTable, homes: Mapping[str, nn.Parameter], buffers: Buffers) -> None:
        self.table = table
        self.watches: tuple[Watch, ...] = ()  # alone, whatever is written is what all ranks have
        if table.size > 1:
            self.watches = (
                ParameterCounts(homes),
                BufferCounts(buffers),
                ParameterValues(homes),
                BufferValues(buffers),
                GradientsFromOutside(homes),
                StepRates(),
                TensorCounts(),
                Numbers(),
            )  # in the order in which they are told of: by name first

    def begin(self) -> None:
        """Begin anew with what are the parameters and buffers now; all ranks together."""
        for watch in self.watches:
            watch.begin()

    @property
    def told(self) -> Mapping[str, float]:
        """Return the fact that is the same on all ranks that have written the same."""
        return {"writes": float(hash(tuple(watch.number for watch in self.watches)) & _BITS)}  # of numbers alone

    def compare(self, where: str) -> None:
        """Refuse unlike writes between steps, as `check` does; collective."""
        self.check(agree(self.table, LocalFacts(rows=0, signature=where, told=self.told)))

    def check(self, facts: StepFacts) -> None:
        """Refuse unlike writes, where ranks have told of some; collective then.

        Raises:
            StateError: on every rank; names what was written unlike, and the way out.
        """
        if len(set(facts.writes)) > 1:
            told = of_all(self.table, tuple(watch.detail for watch in self.watches))
            self._refuse(list(zip(*told, strict=True)))
        self._settle()

    def _refuse(self, told: list[tuple[object, ...]]) -> None:
        for watch, of_ranks in zip(self.watches, told, strict=True):
            problem = watch.problem(of_ranks)
            if problem:
                if not watch.lasts:  # else the other ranks may do the same later
                    self._settle()
                raise StateError(problem)

    def _settle(self) -> None:
        for watch in self.watches:
            watch.settle()
        journal().next_round()
