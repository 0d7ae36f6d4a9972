"""What a graph depends on of the parameters themselves: their dtypes, and which of them are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

import torch
from torch import Tensor

from hetu_fx.base.torch_private import guard_of

_MOST_GUARDS = 4
_traits = attrgetter("dtype", "requires_grad")


class Traits:
    """Dtypes and `requires_grad` of tensors, as they are when this is made.

    Asking each tensor takes 0.4 microseconds, for wrappers such as home tensors. So torch compares all in one call,
    which also says no where only what surrounds it has changed (autocast); then they are asked, and it is made anew.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tuple({id(tensor): tensor for tensor in tensors}.values())
        self._before = list(map(_traits, self._tensors))
        self._guards: list[Callable[[], bool]] = []

    def hold(self) -> bool:
        """Tell whether they are what they were."""
        if torch.is_grad_enabled():
            return self._hold()
        with torch.enable_grad():
            return self._hold()

    def _hold(self) -> bool:
        for guard in self._guards:
            if guard():
                return True
        if list(map(_traits, self._tensors)) != self._before:
            return False
        made = guard_of(self._tensors) if self._tensors else None
        if made is not None:
            self._guards = [made, *self._guards][:_MOST_GUARDS]
        return True
