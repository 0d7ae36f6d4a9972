"""What the script does to home tensors of any kind: parameters, gradients, states of optimizers, averages of its own.

Each rank notes little, which is alike on ranks that have done the same. What optimizers write in their steps is not
noted, as devices of unlike kinds run other kernels for it; the rates of the steps are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hetu_fx.base.memory import Log
from hetu_fx.base.per_rank import PerRank
from hetu_fx.switching.home.values import Signed, mark_value

Rates = tuple[tuple[tuple[str, tuple[float, ...]], ...], ...]
"""Of one step, by group of parameters: the numbers that the optimizer goes by, by name."""

_ROUND = "journal_round"


class Journal:
    """What was written on this rank.

    Attributes:
        tensors: how many were written, each counted once a round: kernels differ in how often they write one.
        numbers: that they were written with (`gradient.mul_(0.5)`).
        values: signs of the plain tensors that they were written with.
        steps: of optimizers that have home parameters.
    """

    def __init__(self) -> None:
        self.tensors = 0
        self.numbers: Log[float] = Log()
        self.values: Log[Signed] = Log()
        self.steps: Log[Rates] = Log()
        self._rates: Rates = ()
        self._round = 0
        self._is_stepping = False

    def next_round(self) -> None:
        """Begin another round; whatever step there was has ended, maybe by an error."""
        self._round += 1
        self._is_stepping = False

    def begin_step(self, rates: Rates | None) -> None:
        """Note a step of an optimizer, whose writes do not count; None if it has no home parameters."""
        self._is_stepping = True
        if rates is not None:
            if rates != self._rates:
                self._rates = rates
            self.steps.note(self._rates)  # one object for steps by the same rates: a kilobyte each

    def end_step(self) -> None:
        """Note writes again."""
        self._is_stepping = False

    def write(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what an op writes to, its first argument, and with which numbers."""
        if self._is_stepping:
            return
        for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
            fields = vars(tensor)
            if "local" in fields and fields.get(_ROUND) != self._round:  # a home tensor: plain ones are each rank's own
                fields[_ROUND] = self._round
                self.tensors += 1
        for argument in (*args[1:], *kwargs.values()):
            if type(argument) is float or type(argument) is int:
                self.numbers.note(float(argument))

    def write_value(self, piece: Tensor, whole: Tensor) -> None:
        """Note that a whole plain value was written, of which this piece is the rank's part."""
        self.values.note(mark_value(piece, whole))


journal = PerRank(Journal)
"""Gives that of this rank."""
