"""What the script does to home tensors of any kind: parameters, gradients, states of optimizers, averages of its own.

Each rank notes little, which is alike on ranks that have done the same: numbers, signs of whole values, of which a rank
keeps its part only, and what is a copy of what. What optimizers write in their steps is not noted, as devices of unlike
kinds run other kernels for it; the rates of the steps are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hetu_fx.base.dtypes import as_reals, carries_gradient
from hetu_fx.base.memory import Log
from hetu_fx.base.per_rank import own
from hetu_fx.base.torch_private import version
from hetu_fx.switching.home.layout import HomeLayout

T = TypeVar("T")
Rates = tuple[tuple[tuple[str, tuple[float, ...]], ...], ...]
"""Of one step, by group of parameters: the numbers that the optimizer goes by, by name."""

SIGN = "sign_of_written"
"""At a piece: the `PendingSign` of the whole value that was written there last, until ranks have compared."""

NAMED = "named"
"""At a parameter: its name; at a gradient that a backward has made that, and the number of the backward."""

GRADIENTS = "gradients"
"""At a model's first parameter: the `Gradients` of its last backward."""

_MOST_ELEMENTS = 1 << 18  # of a large tensor that a sign looks at
_ROUND = "journal_round"


class Sign(NamedTuple):
    """What tells a value from others: its product with a vector of signs, its norm, and how exact its dtype is.

    Alike for values that are alike but for rounding, on any devices.
    """

    product: float
    norm: float
    eps: float

    def plus(self, other: Sign) -> Sign:
        """Return the sign of a sum; its norm is a bound."""
        return Sign(self.product + other.product, self.norm + other.norm, max(self.eps, other.eps))

    def is_like(self, other: Sign) -> bool:
        """Tell whether both may be signs of one value, computed on two devices."""
        if str(self) == str(other):  # as text: nan is not equal to itself
            return True
        tolerance = min(1e-2, 1000 * max(self.eps, other.eps)) * max(self.norm, other.norm)
        pairs = (self.product, other.product), (self.norm, other.norm)
        return all(math.isclose(one, like, rel_tol=0, abs_tol=tolerance) for one, like in pairs)


class PendingSign(NamedTuple):
    """A sign that may still be computed, where the value is: reading it waits."""

    numbers: Tensor
    eps: float

    @classmethod
    def of(cls, whole: Tensor) -> PendingSign:
        """Begin to compute the sign of a whole value."""
        flat = (whole if whole.layout == torch.strided else whole.to_dense()).detach().reshape(-1)
        flat = flat[:: max(1, -(-flat.numel() // _MOST_ELEMENTS))]
        values = as_reals(flat).reshape(-1).double()
        signs = 1 - 2 * (torch.arange(values.numel(), device=values.device) * 2654435761 // 65536 % 2)
        eps = torch.finfo(whole.dtype).eps if carries_gradient(whole.dtype) else 0.0
        return cls(torch.stack([values @ signs.double(), torch.linalg.vector_norm(values)]), eps)

    @property
    def sign(self) -> Sign:
        """Return it."""
        product, norm = self.numbers.tolist()
        return Sign(product, norm, self.eps)


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """A piece that is a copy of another, so that it has a name on every rank: an average, the best state so far.

    Attributes:
        piece: the copy.
        source: the piece that it was copied from.
        writes: to the home tensor of that piece, when it was copied.
        layout: of both.
    """

    piece: ref[Tensor]
    source: ref[Tensor]
    writes: int
    layout: HomeLayout


class Gradients(NamedTuple):
    """Gradients of a model as its last backward has left them, also if they have been cleared since.

    Attributes:
        backward: its number among those of all models, the same on all ranks.
        of: what stood at each parameter, by name.
    """

    backward: int
    of: Mapping[str, Tensor]


class Journal:
    """What was written on this rank, and copied.

    Attributes:
        tensors: how many were written, each counted once a round: kernels differ in how often they write one.
        numbers: that they were written with (`gradient.mul_(0.5)`).
        values: signs of the plain tensors that they were written with.
        steps: of optimizers that have home parameters.
        swaps: how often tensors have been given other pieces.
        is_stepping: an optimizer makes a step.
        writing: the ops that are writing; see `undisturbed`.
        writes: begun so far.
        backwards: that have brought gradients home.
        optimizers: of home parameters that have been stepped, with their numbers in the order of their first steps.
        pointwise: what `held` knows of the step that is under way, if its kernels may have pieces.
    """

    def __init__(self) -> None:
        self.tensors = 0
        self.numbers: Log[float] = Log()
        self.values: Log[PendingSign] = Log()
        self.steps: Log[Rates] = Log()
        self.swaps = 0
        self.writing: list[Any] = []
        self.writes = 0
        self.backwards = 0
        self.optimizers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.pointwise: Any = None
        self._num_optimizers = 0
        self.is_stepping = False
        self._rates: Rates = ()
        self._round = 0
        self._copies: dict[int, PieceCopy] = {}

    def next_round(self) -> None:
        """Begin another round; any step has ended, maybe by an error."""
        self._round += 1
        self.is_stepping = False

    def number(self, optimizer: Optimizer) -> None:
        """Give an optimizer its number, which no other has had."""
        self.optimizers[optimizer] = self._num_optimizers
        self._num_optimizers += 1

    def begin_step(self, rates: Rates | None) -> None:
        """Note a step of an optimizer, whose writes do not count; None if it has no home parameters."""
        self.is_stepping = True
        if rates is not None:
            if rates != self._rates:
                self._rates = rates
            self.steps.note(self._rates)  # one object for steps by the same rates: a kilobyte each

    def write(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what an op writes to, its first argument, and with which numbers."""
        if self.is_stepping:
            return
        written: Sequence[Any] = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        for tensor in written:
            fields = vars(tensor)
            if "local" in fields and fields.get(_ROUND) != self._round:  # a home tensor: plain ones are each rank's own
                fields[_ROUND] = self._round
                self.tensors += 1
        for argument in (*args[1:], *kwargs.values()):
            if type(argument) is float or type(argument) is int:
                self.numbers.note(float(argument))

    def begin_write(self, op: Any) -> None:
        """Say that an op begins to write, until `writing` has it no longer."""
        self.writes += 1
        self.writing.append(op)

    def undisturbed(self, read: Callable[[], T]) -> T | None:
        """Read pieces in another thread than the one that computes; None if something was written meanwhile."""
        before = self.writes
        found = None if self.writing else read()
        return found if before == self.writes else None

    def note_gradients(self, homes: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> None:
        """Note the gradients that a backward has made of some parameters, which are put or added to those there are."""
        self.backwards += 1
        for name, gradient in made.items():
            vars(gradient)[NAMED] = name, self.backwards
        before = {name: home.grad for name, home in homes.items() if home.is_leaf and home.grad is not None}
        vars(next(iter(homes.values())))[GRADIENTS] = Gradients(self.backwards, {**made, **before})

    def write_value(self, piece: Tensor, whole: Tensor) -> None:
        """Note, here and at the piece, that a whole plain value was written, of which this piece is the rank's part."""
        vars(piece)[SIGN] = signed = PendingSign.of(whole)
        self.values.note(signed)

    def note_copy(self, source: Tensor, source_piece: Tensor, piece: Tensor, layout: HomeLayout) -> None:
        """Remember as long as it is there that `piece` is a copy of that of the home tensor `source`.

        A copy of an unwritten copy is one of what that is a copy of, which stays when the one between goes.
        """
        if piece is source_piece:
            return
        copies, number = self._copies, id(piece)
        made = PieceCopy(ref(piece, lambda _: copies.pop(number, None)), ref(source_piece), version(source), layout)
        between = None if version(source_piece) else self.copy_at(source_piece)
        first = None if between is None else between.source()
        if between is not None and first is not None and first.dtype == source_piece.dtype:
            made = replace(made, source=between.source, writes=between.writes)
        copies[number] = made

    def copy_at(self, piece: Tensor) -> PieceCopy | None:
        """Return what is known of a piece as a copy; None if it is none."""
        found = self._copies.get(id(piece))
        return found if found is not None and found.piece() is piece else None

    def copies(self) -> Iterator[tuple[Tensor, PieceCopy]]:
        """Yield the copies that are there; from any thread."""
        for found in list(self._copies.values()):
            piece = found.piece()
            if piece is not None:
                yield piece, found


journal = partial(own, Journal)
"""Gives that of this rank."""
