"""The generators that a module may draw random numbers from, as values by which another rank draws the same ones."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hetu_fx.base.device_types import HOST, device_type_record


@dataclass(frozen=True)
class RandomNumbers:
    """The states of a rank's generators: which numbers its module would draw next.

    Attributes:
        generators: those of torch, by the types of devices: of the host, and of the rank's device.
        python: that of Python's `random`.
        numpy: that of `numpy.random`; empty where nobody has imported it, or it is not numpy's own generator.
    """

    generators: Mapping[str, bytes]
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def of(cls, device: torch.device) -> RandomNumbers:
        """Return the states now, on a rank that computes on this device."""
        kinds = {kind.name: kind for kind in (device_type_record(HOST), device_type_record(device))}
        found = {name: kind.random_state() for name, kind in kinds.items()}
        states = {name: bytes(state.tolist()) for name, state in found.items() if state is not None}
        return cls(states, random.getstate(), _of_numpy())

    def draw_next(self, device: torch.device) -> None:
        """Let this rank's generators go on from these states, as far as it has such ones."""
        for kind in {kind.name: kind for kind in (device_type_record(HOST), device_type_record(device))}.values():
            if kind.name in self.generators:
                kind.set_random_state(torch.tensor(list(self.generators[kind.name]), dtype=torch.uint8))
        random.setstate(self.python)
        if self.numpy and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(self.numpy)

    @contextmanager
    def drawn(self, device: torch.device) -> Iterator[None]:
        """Draw from these states inside; afterwards the rank's own generators go on where they were."""
        own = RandomNumbers.of(device)
        self.draw_next(device)
        try:
            yield
        finally:
            own.draw_next(device)


def _of_numpy() -> tuple[Any, ...]:
    state = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else {}
    if isinstance(state, dict):  # of another generator than numpy's own, which somebody has put there
        return ()
    name, words, *others = state
    return (name, tuple(words.tolist()), *others)
