"""Gather units of parameters when a step comes to them, and let them go after it: zero 3 at run time.

The leaves of a step's graph of autograd stay the same tensors all the time, in buffers that units take turns in. So
autograd, recomputation and compiled pieces need not know of it. A unit is let go when the step comes to the next visit
(`UnitPlan`), forward or backward: never because its gradients are there, as a backward may need weights that have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hetu_fx.base.torch_private import version
from hetu_fx.errors import StateError
from hetu_fx.switching.bridge.bridge import Bridge, Handle
from hetu_fx.transforms.lowering.units import UnitPlan

ALIGNED = 64
"""Bytes: where parameters begin in a buffer."""


@contextmanager
def _writing() -> Iterator[None]:
    """Write to tensors that steps of training read as well, whatever the mode is that a step runs in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class HandsOn(Protocol):
    """Takes note that a unit's gradients are whole."""

    def hand_on(self, unit: int) -> None:
        """Start them on their way home."""


class UnitBuffers:
    """The memory in which this rank's units are gathered, and what is in it; units that may be there at once differ.

    Attributes:
        present: the units that are gathered.
        most_bytes: the most that units which were gathered at once, or on their way, have taken here.
        num_gathers: how often a unit was gathered.
    """

    def __init__(self, plan: UnitPlan, bridge: Bridge, device: torch.device) -> None:
        self.plan, self.bridge, self._device = plan, bridge, device
        self.present: set[int] = set()
        self.most_bytes = self.num_gathers = 0
        self._coming: dict[int, list[Handle]] = {}
        self._walk: Callable[[], object] = _nobody  # which uses the buffers
        with _writing():
            self._slots, self._places = self._laid_out()
            self._targets = self.aliases()

    def _laid_out(self) -> tuple[list[torch.UntypedStorage], dict[str, tuple[torch.UntypedStorage, int]]]:
        """Return a buffer for each slot, as large as its largest unit, and where in which of them parameters are."""
        dtypes = {entry.name: entry.dtype for entry in self.bridge.plan.entries}
        starts, filled = dict[str, int](), dict[int, int]()
        for unit, slot in enumerate(self.plan.slots):
            end = 0
            for name in self._arriving(unit):
                starts[name] = end // dtypes[name].itemsize
                end += -(-self.bridge.arriving[name].numel() * dtypes[name].itemsize // ALIGNED) * ALIGNED
            filled[slot] = max(filled.get(slot, 0), end)
        buffers = {slot: torch.empty(size, dtype=torch.uint8, device=self._device) for slot, size in filled.items()}
        storages = {slot: buffer.untyped_storage() for slot, buffer in buffers.items()}
        slot_of = {name: self.plan.slots[self.plan.unit_of[name]] for name in starts}
        return list(storages.values()), {name: (storages[slot_of[name]], start) for name, start in starts.items()}

    def _arriving(self, unit: int) -> list[str]:
        return [name for name in self.plan.units[unit] if name in self.bridge.arriving]

    @cached_property
    def _bytes(self) -> list[int]:
        """Return what each unit takes here."""
        return [sum(self._targets[name].nbytes for name in self._arriving(u)) for u in range(len(self.plan.units))]

    @property
    def num_bytes(self) -> int:
        """Return what the buffers take."""
        return sum(storage.nbytes() for storage in self._slots)

    @property
    def live_bytes(self) -> int:
        """Return what units that are gathered, or on their way, take here."""
        return sum(self._bytes[unit] for unit in {*self.present, *self._coming})

    def aliases(self) -> dict[str, Tensor]:
        """Return new tensors of the memory in which parameters are gathered, which count writes of their own."""
        found = {}
        for entry in self.bridge.plan.entries:
            if entry.name in self._places:
                storage, start = self._places[entry.name]
                like = torch.empty(self.bridge.arriving[entry.name], dtype=entry.dtype, device="meta")
                empty = torch.empty(0, dtype=entry.dtype, device=self._device)
                found[entry.name] = empty.set_(storage, start, like.shape, like.stride())
        return found

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in a buffer, or a view of what is."""
        place = tensor.untyped_storage().data_ptr()
        return place != 0 and any(place == storage.data_ptr() for storage in self._slots)

    def take(self, walk: object) -> None:
        """Let a walk use the buffers, until it lets go of them. Raises StateError where another one does."""
        if self._walk() not in (None, walk):
            raise StateError(
                "a step begins, or its backward, while another step's units of parameters are gathered: a hook runs "
                "the model inside its own forward or backward\nhint: run it after that, or use zero 2"
            )
        self._walk = weakref.ref(walk)

    @_writing()
    def let_go(self) -> None:
        """Let all units go; what is on its way arrives first, as it is being sent."""
        try:
            for unit in list(self._coming):
                self._arrive(unit)
        finally:
            self._coming.clear()
            self._drop(self.present)
            self._walk = _nobody

    @_writing()
    def keep(self, units: Collection[int]) -> None:
        """Let units go that are gathered and not among these."""
        self._drop(self.present - set(units))

    @_writing()
    def hold(self, units: Collection[int], pieces: Mapping[str, Tensor]) -> None:
        """Have these units gathered, and no others; collective."""
        assert self._coming.keys() <= set(units), "what was begun is what is read next"
        self.keep(units)
        for unit in sorted(units):
            if unit in self._coming:
                self._arrive(unit)
            elif unit not in self.present:
                self._note(unit)
                self._put(unit, self.bridge.gather_unit(unit, pieces, self._targets))

    @_writing()
    def begin(self, units: Collection[int], pieces: Mapping[str, Tensor]) -> None:
        """Begin to gather units that are read next, unless that is too much at once: of whole units, as all decide it.

        Collective.
        """
        coming = sorted(set(units) - self.present)
        if sum(self.plan.num_bytes[unit] for unit in {*self.present, *units}) > self.plan.most_bytes:
            return
        for unit in coming:
            self._coming[unit] = self.bridge.begin_unit(unit, pieces, self._targets)
            self._note()

    def _arrive(self, unit: int) -> None:
        made: dict[str, Tensor] = {}
        for handle in self._coming.pop(unit):
            made |= handle.wait()
        self._put(unit, made)

    def _put(self, unit: int, made: Mapping[str, Tensor]) -> None:
        """Put what has arrived elsewhere in its place."""
        for name in self._arriving(unit):
            if made[name] is not self._targets[name]:
                self._targets[name].copy_(made[name])
        self.present.add(unit)
        self.num_gathers += 1

    def _note(self, *more: int) -> None:
        self.most_bytes = max(self.most_bytes, self.live_bytes + sum(self._bytes[unit] for unit in more))

    def _drop(self, units: Collection[int]) -> None:
        """Forget what is in units; where memory that nobody has written has no numbers in it, neither has theirs."""
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
            for target in (self._targets[name] for unit in units for name in self._arriving(unit)):
                if target.is_floating_point():
                    target.fill_(torch.nan)
        self.present = self.present - set(units)


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
        names = {entry.name for entry in buffers.bridge.plan.entries} & buffers.bridge.kept
        self.copies = {name: piece for name, piece in pieces.items() if name in names} | aliases
        self._at, self._hands_on = -1, _nobody
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
            self._hands_on = _nobody
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
        collector: Any = self._hands_on()
        for unit in reversed(self.buffers.plan.begun_at[visit]):
            collector.hand_on(unit)

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


def _nobody() -> None:
    """Stand in for a reference to nobody."""
