"""The script's writes to parameters, and to what belongs to them: alike on all ranks, or the ranks are told."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import ClassVar

from torch import nn

from hetu_fx.comm_ops.wire.consensus import LocalFacts, StepFacts, agree, of_all
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.home.journal import Rates, journal
from hetu_fx.switching.home.parameters import Buffers
from hetu_fx.switching.home.values import Sign
from hetu_fx.switching.home.watch import WriteWatch, are_alike, clean, names_of, numbers_of
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
        self.watches: tuple[WriteWatch, ...] = ()  # alone, whatever is written is what all ranks have
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


class _Noted:
    """Something of the journal, since all have compared."""

    lasts: ClassVar[bool] = False

    def __init__(self) -> None:
        self.settle()

    def begin(self) -> None:
        """Do nothing: the journal is of the whole process."""

    def settle(self) -> None:
        raise NotImplementedError


class StepRates(_Noted):
    """The numbers that optimizers have gone by in their steps."""

    def settle(self) -> None:
        """Compare later steps."""
        self._seen = journal().steps.count

    @property
    def number(self) -> Hashable:
        """Return them, step by step; without names, whose hashes differ by process."""
        return tuple(tuple(tuple(number for _, number in group) for group in rates) for rates in self.detail)

    @property
    def detail(self) -> list[Rates]:
        """Return them, step by step."""
        return journal().steps.since(self._seen)

    def problem(self, told: Sequence[Sequence[Rates]]) -> str:
        """Name the first number that is unlike."""
        for of_ranks in zip(*told, strict=False):
            for groups in zip(*of_ranks, strict=False):
                for name, numbers in _by_name(groups):
                    if len(set(map(str, numbers))) > 1:
                        return _unlike_rates(name, numbers)
        return ""


class TensorCounts(_Noted):
    """How many gradients, states of optimizers and other home tensors the script has written."""

    lasts: ClassVar[bool] = True

    def settle(self) -> None:
        """Count from now on."""
        self._seen = journal().tensors

    @property
    def number(self) -> int:
        """Return the count."""
        return journal().tensors - self._seen

    @property
    def detail(self) -> int:
        """Return the count."""
        return self.number

    def problem(self, told: Sequence[int]) -> str:
        """Say how many each rank has written."""
        return _unlike_counts(told) if len(set(told)) > 1 else ""


class Numbers(_Noted):
    """The numbers, and the values, that the script has written home tensors with."""

    def settle(self) -> None:
        """Compare what is written from now on."""
        self._seen = journal().numbers.count, journal().values.count

    @property
    def number(self) -> Hashable:
        """Return them."""
        numbers, signs = self.detail
        return tuple(map(clean, numbers)), numbers_of(signs)

    @property
    def detail(self) -> tuple[list[float], list[Sign]]:
        """Return them, signs of the values."""
        return journal().numbers.since(self._seen[0]), [one.sign for one in journal().values.since(self._seen[1])]

    def problem(self, told: Sequence[tuple[list[float], list[Sign]]]) -> str:
        """Show the first number that is unlike."""
        for of_ranks in zip(*(numbers for numbers, _ in told), strict=False):
            if not all(_are_close(one, of_ranks[0]) for one in of_ranks):
                return _unlike_numbers(f"the numbers {', '.join(f'{one:g}' for one in of_ranks)}, by rank")
        for signs in zip(*(signs for _, signs in told), strict=False):
            if not are_alike(signs):
                return _unlike_numbers(f"tensors of norms {', '.join(f'{one.norm:.4g}' for one in signs)}, by rank")
        return ""


def _unlike_rates(name: str, of_ranks: Sequence[Sequence[float]]) -> str:
    shown = ", ".join(f"{_short(numbers)} on rank {rank}" for rank, numbers in enumerate(of_ranks))
    return (
        f"the processes have stepped an optimizer with unlike {name!r}: {shown}. Each would update its own part of the "
        f"parameters in its own way; set it on all processes alike, and step schedules on all of them, by a value that "
        f"all have (a loss of all rows, as the model's call returns it, or what process 0 has, by "
        f"torch.distributed.broadcast_object_list)"
    )


def _unlike_counts(told: Sequence[int]) -> str:
    return (
        f"the processes have written unequally many gradients, states of optimizers or copies of parameters since the "
        f"last call: {', '.join(map(str, told))} tensors, by rank. Each has its own part of them, so what one writes "
        f"alone (scales or clips gradients, sets them to zero, resets a momentum, keeps an average) changes this part "
        f"alone; do it on all processes"
    )


def _unlike_numbers(shown: str) -> str:
    return (
        f"the processes have written gradients, states of optimizers or copies of parameters with unlike values: "
        f"{shown}. Each has its own part of them, so the whole would be what none of them meant; use a value that all "
        f"have (a sum or mean over torch.distributed.all_reduce, the same torch.manual_seed before it is drawn)"
    )


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4) or str(one) == str(other)  # as text: nan is not equal to itself


def _short(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _by_name(groups: Iterable[Iterable[tuple[str, tuple[float, ...]]]]) -> Iterable[tuple[str, list[Sequence[float]]]]:
    options = list(map(dict, groups))
    return ((name, [one.get(name, ()) for one in options]) for name in names_of(options))
