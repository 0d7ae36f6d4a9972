"""accelerate: its launcher, its wrapped optimizers, its mark for prepared models, and the precision it asks for.

A marked model is not wrapped for data parallelism, nor is it run under the autocast of `Accelerator(mixed_precision=)`:
accelerate returns it as it is. So its `prepare_model` is made to add that, when it meets a parallel model.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hetu_fx import Framework, Launcher, register_framework
from hetu_fx.errors import StateError

MARK = "_is_accelerate_prepared"  # accelerate leaves objects with it alone
TO_COME = "to come"  # the mark of a parallel model that has not met an Accelerator yet
ORIGINAL = "_original_forward"  # by which `unwrap_model(model, keep_fp32_wrapper=False)` takes off what was put on


def mark_prepared(model: nn.Module) -> None:
    """Have accelerate's `prepare` leave the model as it is, by its mark for prepared objects, but for its precision."""
    if MARK not in vars(model):
        object.__setattr__(model, MARK, TO_COME)
    vars(model).pop(ORIGINAL, None)  # of a model prepared before: what it had been wrapped in was captured with it
    if find_spec("accelerate") is not None:
        _teach_prepare()


@functools.cache
def _teach_prepare() -> None:
    """Make every Accelerator, those of today and those to come, ask parallel models for its precision."""
    from accelerate import Accelerator

    prepare_model = Accelerator.prepare_model

    @functools.wraps(prepare_model)
    def with_precision(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare_model(self, model, *args, **kwargs)
        if getattr(model, MARK, None) == TO_COME:
            ask_for_precision(self, model)
        return prepared

    Accelerator.prepare_model = with_precision


def ask_for_precision(accelerator: Any, model: nn.Module) -> None:
    """Run a model's forward under the accelerator's autocast, and give its outputs in float32, as `prepare_model` does.

    Raises:
        StateError: mixed precision is fp8, whose layers are others than those that were captured.
    """
    from accelerate.utils import convert_outputs_to_fp32, get_mixed_precision_context_manager

    if accelerator.mixed_precision == "fp8":
        raise StateError(
            "Accelerator(mixed_precision='fp8') puts other layers in the model, after hetu_fx.auto_parallelize has "
            "captured it; use mixed_precision='bf16'"
        )
    object.__setattr__(model, MARK, True)
    if not accelerator.native_amp:
        return
    autocast = get_mixed_precision_context_manager(accelerator.native_amp, accelerator.autocast_handler)
    object.__setattr__(model, ORIGINAL, model.forward)
    forward = convert_outputs_to_fp32(autocast(model.forward.__func__))  # type: ignore[attr-defined]
    object.__setattr__(model, "forward", MethodType(forward, model))


def torch_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return what accelerate has wrapped, as its wrapper has no hooks of its own."""
    wrapped: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return wrapped


TWO_PROCESSES = "ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 --num_machines 1 SCRIPT"

register_framework(
    Framework(
        name="accelerate",
        adopt=mark_prepared,
        torch_optimizer=torch_optimizer,
        launcher=Launcher("accelerate launch", "ACCELERATE_MIXED_PRECISION", TWO_PROCESSES),
    )
)
