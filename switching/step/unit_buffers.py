"""The memory in which units of parameters are gathered (zero 3), which they take turns in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.errors import StateError
from hetu_fx.switching.bridge.bridge import Bridge, BucketsUnderWay
from hetu_fx.transforms.lowering.units import UnitPlan

ALIGNED = 64
"""Bytes: where parameters begin in a buffer."""


@contextmanager
def _writing() -> Iterator[None]:
    """Write to tensors that steps of training read as well, whatever the mode is that a step runs in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class UnitBuffers:
    """The memory in which this rank's units are gathered, and what is in it; units that may be there at once differ.

    Attributes:
        present: the units that are gathered.
        most_bytes: the most that units which were gathered at once, or on their way, have taken here.
        num_gathers: how often a unit was gathered.
        kept: the parameters that are at home as they are read, and need no memory here.
    """

    def __init__(self, plan: UnitPlan, bridge: Bridge, device: torch.device) -> None:
        self.plan, self.bridge, self._device = plan, bridge, device
        self.kept, self._sizes = bridge.kept(), bridge.arriving()
        self.present: set[int] = set()
        self.most_bytes = self.num_gathers = 0
        self._coming: dict[int, BucketsUnderWay] = {}
        self._walk: Callable[[], object] = nobody  # which uses the buffers
        with _writing():
            self._slots, self._places = self._laid_out()
            self._targets = self.aliases()
        units = range(len(plan.units))
        self._bytes = [sum(self._targets[name].nbytes for name in self._arriving(unit)) for unit in units]

    def _laid_out(self) -> tuple[list[Tensor], dict[str, tuple[Tensor, int]]]:
        """Return a buffer for each slot, as large as its largest unit, and where in which of them parameters are."""
        dtypes = {entry.name: entry.dtype for entry in self.bridge.plan.entries}
        starts, filled = dict[str, int](), dict[int, int]()
        for unit, slot in enumerate(self.plan.slots):
            end = 0
            for name in self._arriving(unit):
                starts[name] = end // dtypes[name].itemsize
                end += -(-self._sizes[name].numel() * dtypes[name].itemsize // ALIGNED) * ALIGNED
            filled[slot] = max(filled.get(slot, 0), end)
        buffers = {slot: torch.empty(size, dtype=torch.uint8, device=self._device) for slot, size in filled.items()}
        slot_of = {name: self.plan.slots[self.plan.unit_of[name]] for name in starts}
        return list(buffers.values()), {name: (buffers[slot_of[name]], start) for name, start in starts.items()}

    def _arriving(self, unit: int) -> list[str]:
        return [name for name in self.plan.units[unit] if name in self._sizes]

    @property
    def num_bytes(self) -> int:
        """Return what the buffers take."""
        return sum(buffer.nbytes for buffer in self._slots)

    @property
    def live_bytes(self) -> int:
        """Return what units that are gathered, or on their way, take here."""
        return sum(self._bytes[unit] for unit in {*self.present, *self._coming})

    def aliases(self) -> dict[str, Tensor]:
        """Return new tensors of the memory in which parameters are gathered, which count writes of their own."""
        found = {}
        for entry in self.bridge.plan.entries:
            if entry.name in self._places:
                buffer, start = self._places[entry.name]
                size = self._sizes[entry.name]
                found[entry.name] = buffer.view(entry.dtype).narrow(0, start, size.numel()).view(size).data
        return found

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in a buffer, or a view of what is."""
        place = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        return place != 0 and any(place == buffer.untyped_storage().data_ptr() for buffer in self._slots)

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
            self._walk = nobody

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
                self._put(unit, self.bridge.begin_unit(unit, pieces, self._targets).wait())

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
        self._put(unit, self._coming.pop(unit).wait())

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
        if torch.are_deterministic_algorithms_enabled():
            for target in (self._targets[name] for unit in units for name in self._arriving(unit)):
                if carries_gradient(target.dtype):
                    target.fill_(torch.nan)
        self.present = self.present - set(units)


def nobody() -> None:
    """Stand in for a reference to nobody."""
