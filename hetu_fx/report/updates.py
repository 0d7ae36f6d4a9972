"""Steps as a script counts them: batches between two steps of the optimizer are one step of the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakMethod

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

Entry = Mapping[str, Any]
"""What happened, as JSON can say it."""

_OF_ALL = ("tokens", "flops")  # known of a step where they are known of all its batches
_ADDED = ("seconds", "predicted_seconds", "planning_seconds", "waited_seconds", *_OF_ALL)
_ADDED_BY_PLACE = ("rows", "compute_seconds", "host_seconds")


class Updates:
    """Joins training batches whose gradients are added up, and numbers entries by steps of the optimizer.

    A step is over once an optimizer of the parameters has stepped, or no parameter has a gradient (for loops that
    update without one of torch's optimizers).

    Attributes:
        number: of steps that have begun.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], number: int) -> None:
        self._parameters, self.number = tuple(parameters), number
        self._ids = frozenset(map(id, self._parameters))
        self._held: Entry | None = None
        self._is_open = self._has_stepped = False
        note = WeakMethod(self._note)  # torch keeps the hook, which must not keep the model
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: (known := note()) and known(optimizer))

    def joined(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield entries with the numbers of their steps; a training batch once its step is over."""
        for entry in entries:
            if entry["event"] == "step":
                yield from self._batch(entry)
            else:
                yield from self.rest() if entry["event"] == "switch" else ()
                yield {**entry, "step": self.number}

    def rest(self) -> Iterator[Entry]:
        """Yield what is held back of a step that is not over, or went on in another variant."""
        if self._held is not None:
            yield {**self._held, "step": self.number}
            self._held = None

    def close(self) -> None:
        """Look on no more."""
        self._hook.remove()

    def _batch(self, entry: Entry) -> Iterator[Entry]:
        self.number += not self._is_open
        self._held = entry if self._held is None else _sum(self._held, entry)
        self._is_open = not (self._has_stepped or all(parameter.grad is None for parameter in self._parameters))
        self._has_stepped = False
        if not self._is_open:
            yield from self.rest()

    def _note(self, optimizer: Optimizer) -> None:
        own = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        self._has_stepped |= not self._ids.isdisjoint(own)


def _sum(one: Entry, other: Entry) -> Entry:
    """Return two batches of one step as one: seconds and rows added up, the mean of the losses."""
    count = one.get("micro_steps", 1)
    made: dict[str, Any] = {**one, "micro_steps": count + 1, "longest": max(one["longest"], other["longest"])}
    for name in _ADDED:
        if name in one and name in other:
            made[name] = None if None in (one[name], other[name]) else one[name] + other[name]
    for name in _OF_ALL:
        if name not in other:
            made.pop(name, None)
    for name in _ADDED_BY_PLACE:  # empty where nobody has told them
        same = len(one[name]) == len(other[name])
        made[name] = [a + b for a, b in zip(one[name], other[name], strict=True)] if same else []
    losses = one["loss"], other["loss"]
    made["loss"] = None if None in losses else (one["loss"] * count + other["loss"]) / (count + 1)
    return made
