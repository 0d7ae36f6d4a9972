"""Optimizers by number, in the order of their first steps: the same on all ranks. What one has loaded is cut at a step.

All optimizers: those that are known may be wrapped in one without hooks of its own (accelerate's are).
"""

from __future__ import annotations

from itertools import count
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hetu_fx.switching.home.parameters import cut_optimizer_state

_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_numbers = count()


def numbered() -> tuple[tuple[Optimizer, int], ...]:
    """Return all optimizers that have been stepped, with their numbers; from any thread."""
    return tuple(_seen.items())


def _remember(optimizer: Optimizer, *_: object) -> None:
    if optimizer not in _seen:
        _seen[optimizer] = next(_numbers)
        optimizer.register_load_state_dict_post_hook(cut_optimizer_state)
        cut_optimizer_state(optimizer)


register_optimizer_step_pre_hook(_remember)
