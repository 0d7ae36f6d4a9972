"""Gather units of parameters when a step comes to them, and let them go after it: zero 3 at run time.

The leaves of a step's graph of autograd stay the same tensors all the time, in buffers that units take turns in. So
autograd, recomputation and compiled pieces need not know of it. A unit is let go when the step comes to the next visit
(`UnitPlan`), forward or backward: never because its gradients are there, as a backward may need weights that have none.
Autograd runs a step's backward in the reverse order of its forward: a visit is over when that before it begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hetu_fx.base.torch_private import version
from hetu_fx.errors import StateError
from hetu_fx.switching.step.unit_buffers import UnitBuffers, nobody


class HandsOn(Protocol):
    """Takes note that a unit's gradients are whole."""

    def hand_on(self, unit: int, names: Iterable[str]) -> None:
        """Start those of its parameters on their way home."""


_NOBODY: Callable[[], HandsOn | None] = nobody


class UnitWalk:
    """One step's way through all visits: forward once, and back each time that its backward runs.

    Args:
        buffers: where units are gathered.
        pieces: this rank's pieces of the parameters.
        first: the first visit that a gradient comes back to; none is gathered again for those before.

    Attributes:
        copies: what this rank computes with, by name; their values are there while their units are gathered.
    """

    def __init__(self, buffers: UnitBuffers, pieces: Mapping[str, Tensor], first: int) -> None:
        self.buffers, self._pieces, self._first = buffers, dict(pieces), first
        self._versions = [version(piece) for piece in pieces.values()]
        aliases = buffers.aliases()
        self.copies = {name: pieces[name] for name in buffers.kept} | aliases
        self._at, self._hands_on = -1, _NOBODY
        self._goes_back = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Go through all visits, of which this rank may run parts meanwhile; collective."""
        self.buffers.take(self)
        self._at, self._goes_back = -1, False
        try:
            yield
            self._go_to(len(self.buffers.plan.visits) - 1)
        finally:
            self.buffers.let_go()

    @contextmanager
    def backward(self, collector: HandsOn) -> Iterator[None]:
        """Go back through the visits, and hand units' gradients to `collector`; collective, with `end_backward`."""
        self.buffers.take(self)
        self._at, self._goes_back = len(self.buffers.plan.visits), True
        self._hands_on = weakref.ref(collector)  # which owns this
        try:
            yield
        finally:
            self._hands_on = _NOBODY
            self.buffers.let_go()

    def is_outdated(self, pieces: Mapping[str, Tensor]) -> bool:
        """Tell whether parameters have been written to since the forward, so that others would be gathered."""
        are_same = all(pieces.get(name) is piece for name, piece in self._pieces.items())
        return not are_same or [version(piece) for piece in self._pieces.values()] != self._versions

    def end_backward(self) -> None:
        """Go through the visits that are left, and hand on the gradients that are."""
        self._go_to(min(self._first, self._at))
        for visit in range(min(self._at, len(self.buffers.plan.visits) - 1), -1, -1):
            self._hand_on(visit)
        self._at = -1

    def gather(self, visit: int) -> None:
        """Have the units of a visit gathered, and no others."""
        if self._goes_back or not -1 <= self._at <= visit:
            self._refuse(visit)
        self._go_to(visit)

    def release(self, visit: int, values: tuple[Any, ...], *, is_over: bool) -> tuple[Any, ...]:
        """Return what a part of a visit has made, so that its backward gathers the visit's units first.

        Raises:
            StateError: a value is a view of parameters, which it would lose.
        """
        views = [n for n, value in enumerate(values) if isinstance(value, Tensor) and self.buffers.has(value)]
        if views:
            units = sorted(self.buffers.plan.visits[visit])
            raise StateError(
                f"units {units} of parameters are let go, but values {views} of what is made there are views of them, "
                f"and others read these\nhint: use zero 2, or copy what is handed on (.clone())"
            )
        if is_over:
            following = self.buffers.plan.visits[self._at + 1 : self._at + 2]
            self.buffers.keep(frozenset().union(*following))
        made, places = list(values), [n for n, value in enumerate(values) if _needs_gradient(value)]
        if places and torch.is_grad_enabled():
            found = _Release.apply(self, visit, *(made[n] for n in places))  # type: ignore[no-untyped-call]
            for n, value in zip(places, found, strict=True):
                made[n] = value
        return tuple(made)

    def go_back_to(self, visit: int) -> None:
        """Have the units of a visit gathered for its backward: all that was made after it has had its own."""
        if not self._goes_back or visit > self._at or visit < self._first:
            self._refuse(visit)
        self._go_to(visit)

    def _go_to(self, visit: int) -> None:
        while self._at != visit:
            if self._goes_back and self._at < len(self.buffers.plan.visits):
                self._hand_on(self._at)
            self._at += -1 if self._goes_back else 1
            self._enter(self._at, self._at + (-1 if self._goes_back else 1))

    def _enter(self, visit: int, following: int) -> None:
        visits = self.buffers.plan.visits
        self.buffers.hold(visits[visit], self._pieces)
        if (self._first if self._goes_back else 0) <= following < len(visits):
            self.buffers.begin(visits[following] | visits[visit], self._pieces)

    def _hand_on(self, visit: int) -> None:
        collector = self._hands_on()
        assert collector is not None, "it runs the backward"
        for unit in reversed(self.buffers.plan.begun_at[visit]):
            collector.hand_on(unit, self.buffers.plan.units[unit])

    def _refuse(self, visit: int) -> None:
        """Raise a StateError: a leaf that has no values would be read."""
        way = "back" if self._goes_back else "forward"
        raise StateError(
            f"parameters of units {sorted(self.buffers.plan.visits[visit])} are read where they are not gathered: the "
            f"step goes {way} and is at visit {self._at}, they are of visit {visit}"
        )


class _Release(torch.autograd.Function):
    """Hands values on; backward gathers the units that they were made with."""

    @staticmethod
    def forward(ctx: Any, walk: UnitWalk, visit: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.walk, ctx.visit = walk, visit
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.walk.go_back_to(ctx.visit)
        return (None, None, *gradients)


def _needs_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
