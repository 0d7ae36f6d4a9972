"""What an optimizer keeps for an element of a parameter, found out from the optimizer itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from hetu_fx.errors import ProfileError
from hetu_fx.planner.values.state import OPTIMIZERS, ParameterState

_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
    torch.uint8: "int8",
}
_SIDE = 64  # of the parameter that an optimizer is tried on: larger than what it keeps for a whole parameter

_ELSEWHERE = {"params", "foreach", "fused", "capturable", "differentiable"}  # say how, not what is kept

Asked = torch.optim.Optimizer | str | ParameterState | None
"""An optimizer, the name of one of `OPTIMIZERS`, what is known of its state, or nothing."""


def optimizer_state_of(parameters: Iterable[Tensor], optimizer: Asked = None) -> ParameterState:
    """Return what these parameters cost with an optimizer; left out: AdamW.

    An optimizer that has made no step yet is tried on a small parameter: one of its class, with its settings. Raises
    `ProfileError` where that cannot be done, or for an unknown name.
    """
    if isinstance(optimizer, ParameterState):
        return optimizer
    given = list(parameters)
    dtype = _dtype_of(given)
    known = ParameterState(_NAMES.get(dtype), by_lists=_works_by_lists(given, optimizer))
    if optimizer is None or known.dtype is None:
        return known
    if isinstance(optimizer, str):
        return replace(known, optimizer=optimizer)
    slots = _slots(optimizer.state) if optimizer.state else _slots(_tried(optimizer, dtype).state)
    return replace(known, optimizer=_name(optimizer, len(slots)), slots=slots)


def _works_by_lists(parameters: Iterable[Tensor], optimizer: Asked) -> bool:
    """Tell whether an optimizer takes torch's kernels over lists: on accelerators it does unless told otherwise."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else [{"foreach": None}]
    unfused = [group for group in groups if not group.get("fused")]
    on_accelerator = any(one.device.type not in ("cpu", "meta") for one in parameters)
    return any(on_accelerator if group.get("foreach", False) is None else group.get("foreach") for group in unfused)


def _dtype_of(parameters: Iterable[Tensor]) -> torch.dtype:
    """Return the element type of most bytes."""
    sizes: dict[torch.dtype, int] = {}
    for one in parameters:
        sizes[one.dtype] = sizes.get(one.dtype, 0) + one.numel() * one.element_size()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.get_default_dtype())


def _slots(state: Mapping[Tensor, Mapping[str, object]]) -> tuple[str, ...]:
    """Return the element types of the tensors as large as a parameter that are kept for the largest one."""
    largest = max(state, key=lambda parameter: parameter.numel())
    held = [value for value in state[largest].values() if isinstance(value, Tensor)]
    return tuple(_NAMES.get(value.dtype, "fp32") for value in held if value.numel() == largest.numel())


def takes_sparse_gradients_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer makes a step with sparse gradients, and none with dense ones; found out by trying."""
    gradient = torch.zeros(_SIDE, _SIDE)
    return not _makes_a_step(optimizer, gradient) and _makes_a_step(optimizer, gradient.to_sparse())


def _makes_a_step(optimizer: torch.optim.Optimizer, gradient: Tensor) -> bool:
    try:
        _step(optimizer, gradient)
    except Exception:  # whatever a class that nobody here knows raises
        return False
    return True


def _tried(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> torch.optim.Optimizer:
    """Return an optimizer like another one that has made a step."""
    gradient = torch.zeros(_SIDE, _SIDE, dtype=dtype)
    try:
        return _step(optimizer, gradient.to_sparse() if takes_sparse_gradients_alone(optimizer) else gradient)
    except Exception as problem:  # whatever a class that nobody here knows raises
        raise ProfileError(
            f"cannot find out what {type(optimizer).__name__} keeps for a parameter: {problem}\n"
            f"hint: name one like it, optimizer='adamw' (known: {', '.join(OPTIMIZERS)})"
        ) from problem


def _step(optimizer: torch.optim.Optimizer, gradient: Tensor) -> torch.optim.Optimizer:
    """Return an optimizer like another one that has made a step with this gradient."""
    group = optimizer.param_groups[0]
    taken = set(inspect.signature(type(optimizer).__init__).parameters) - _ELSEWHERE
    settings = {name: value for name, value in (optimizer.defaults | group).items() if name in taken}
    parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=gradient.dtype))
    parameter.grad = gradient
    made = type(optimizer)([parameter], **settings)
    made.step()
    return made if made.state else _without_state(made, parameter)


def _without_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.optim.Optimizer:
    optimizer.state[parameter] = {}
    return optimizer


def _name(optimizer: torch.optim.Optimizer, count: int) -> str:
    """Return how the optimizer is called here: with momentum where that makes a difference."""
    name = type(optimizer).__name__.lower()
    return "sgd_momentum" if name == "sgd" and count else name
