"""Trace a model as if it were on the host, whatever device it is on: every kind of device gets the same graph.

What looks at the device while it is traced (masks, kernels, casts, a script's own branches) sees the host. A graph
then says "host" wherever it names a device; `transforms.specialize.place` puts there the device that runs it.

Casts are the one thing in which the host cannot stand for another device: torch.autocast casts other ops on each type.
A model that is under one is traced where it is, unless ranks compute on several types: then all of them cast what the
host casts, whatever they compute on, so that they have one graph (`casting_on_host`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hetu_fx.base.device_types import CPU, HOST, device_types, is_elsewhere
from hetu_fx.base.torch_private import SLOTS, makes_tensors, suspend_trace, tree_map

PARAMETERS = SLOTS[:1]


def stand_in_device(device: torch.device) -> torch.device:
    """Return where a tensor is traced that is on a device; what has no values stays without."""
    return HOST if is_elsewhere(device) else device


def find_device(model: nn.Module, tensors: Mapping[str, Tensor]) -> torch.device:
    """Return the device, other than the host, that a model or else its batch is on; the host where all is there."""
    state = (*model.parameters(), *model.buffers(), *tensors.values())
    return next((tensor.device for tensor in state if is_elsewhere(tensor.device)), HOST)


@contextmanager
def stand_in_state(
    model: nn.Module,
    place: Callable[[torch.device], torch.device],
    kinds: Sequence[str] = SLOTS[:2],
    *,
    anew: bool = False,
) -> Iterator[None]:
    """Let parameters and buffers be at another place inside, without values; tied ones stay tied.

    Args:
        model: whose.
        place: gives for the device that one is on where it is to be.
        kinds: parameters, buffers, or both.
        anew: also what is there already stands aside for others without values.
    """
    stand_ins: dict[int, Tensor] = {}
    slots = [(kind, getattr(module, kind)) for module in model.modules() for kind in kinds]
    held = [
        (kind, where, name, tensor) for kind, where in slots for name, tensor in where.items() if tensor is not None
    ]
    moved = [one for one in held if anew or place(one[3].device) != one[3].device]
    try:
        for kind, where, name, tensor in moved:
            made = _stand_in(tensor, place(tensor.device), kind in PARAMETERS)
            where[name] = stand_ins.setdefault(id(tensor), made)
        yield
    finally:
        for _, where, name, tensor in moved:
            where[name] = tensor


def _stand_in(held: Tensor, device: torch.device, is_parameter: bool) -> Tensor:
    empty = torch.empty(tuple(held.shape), dtype=held.dtype, device=device)
    # A script may have put a computed tensor in a parameter's place (torch.func.functional_call).
    return nn.Parameter(empty, requires_grad=held.requires_grad) if is_parameter else empty


class OnHost(TorchFunctionMode):
    """Inside, what names another device is told the host, and tensors from elsewhere are read as copies there.

    Attributes:
        copies: of such tensors, with what they are copies of, by the number of the copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._copy_of: dict[int, Tensor] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, named = tree_map(self._here, (args, dict(kwargs or {})))
        if makes_tensors(function) or named.get("device") is not None:
            named["device"] = _named(named.get("device"))
        if function is Tensor.to:
            args = tuple(_named(item) if isinstance(item, str) or type(item) is int else item for item in args)
        return args[0] if _moves_to_a_type(function) else function(*args, **named)

    @contextmanager
    def instead_of_attributes(self, model: nn.Module) -> Iterator[None]:
        """Let plain tensors that modules have as attributes be copies on the host inside: a trace names them so."""
        owned = [(space, name, held) for space in map(vars, model.modules()) for name, held in space.items()]
        moved = [one for one in owned if isinstance(one[2], Tensor) and is_elsewhere(one[2].device)]
        for space, name, held in moved:
            space[name] = self._copy(held)
        try:
            yield
        finally:
            for space, name, held in moved:
                space[name] = held

    def _here(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return stand_in_device(value)
        if isinstance(value, Tensor) and is_elsewhere(value.device):
            return self._copy(value)
        return value

    def _copy(self, value: Tensor) -> Tensor:
        if id(value) not in self._copy_of:
            with suspend_trace():
                copy = value.detach().to(HOST)
            self._copy_of[id(value)] = copy
            self.copies[id(copy)] = copy, value
        return self._copy_of[id(value)]


def _named(device: Any) -> torch.device:
    return HOST if device is None else stand_in_device(torch.device(device))


def _moves_to_a_type(function: Callable[..., Any]) -> bool:
    """Tell whether a function is the method of tensors that moves them to devices of a type, such as `.cuda()`."""
    names = (one.name for one in device_types() if one is not CPU)
    return any(getattr(Tensor, name, None) is function for name in names)
