"""Optimizers by number, in the order of their first steps: the same on all ranks. What one has loaded is cut at a step.

All optimizers of home parameters: those that are known may be wrapped in one without hooks of its own (accelerate's
are). Their steps are noted in the journal, with what they go by.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetu_fx.base.patches import Hook, register_patch
from hetu_fx.switching.home import list_steps
from hetu_fx.switching.home.journal import Rates, journal
from hetu_fx.switching.home.parameters import cut_optimizer_state
from hetu_fx.switching.home.tensor import HomeTensor

_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_numbers = count()


def numbered() -> tuple[tuple[Optimizer, int], ...]:
    """Return all optimizers of home parameters that have been stepped, with their numbers; from any thread."""
    return tuple(_seen.items())


def rates_of(optimizer: Optimizer) -> Rates:
    """Return the numbers that an optimizer goes by now: rates, momenta, decays."""
    return tuple(tuple(_rates(group.items())) for group in optimizer.param_groups)


def _rates(options: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, tuple[float, ...]]]:
    for name, value in options:
        numbers = tuple(map(float, filter(_is_number, value if isinstance(value, tuple) else (value,))))
        if numbers and name != "params":
            yield name, numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):  # elsewhere than on the host, reading one waits
        return value.numel() == 1 and value.device.type == "cpu"
    return isinstance(value, (int, float))


def _begin(optimizer: Optimizer, *_: object) -> None:
    has_homes = any(isinstance(p, HomeTensor) for p in _parameters(optimizer))
    if has_homes and optimizer not in _seen:  # others may be one process's own, and would shift the numbers there
        _seen[optimizer] = next(_numbers)
        optimizer.register_load_state_dict_post_hook(cut_optimizer_state)
        cut_optimizer_state(optimizer)
    journal().begin_step(rates_of(optimizer) if has_homes else None)
    list_steps.begin_step(optimizer)


def _parameters(optimizer: Optimizer) -> Iterable[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _end(*_: object) -> None:
    list_steps.end_step()
    journal().end_step()


for register, hook, why in (
    (register_optimizer_step_pre_hook, _begin, "steps would not be noted, and loaded states of optimizers not cut"),
    (register_optimizer_step_post_hook, _end, "what follows a step would be taken for a part of it"),
):
    register_patch(
        Hook("torch", "torch.optim.optimizer", register.__name__, why, tested="2.13", register=partial(register, hook))
    )
