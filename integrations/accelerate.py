"""accelerate: its launcher, its wrapped optimizers, its mark for prepared models, and the precision it asks for.

A marked model is not wrapped for data parallelism, nor is it run under the autocast of `Accelerator(mixed_precision=)`:
accelerate returns it as it is. So its `prepare_model` is made to add that, when it meets a parallel model.

Plugins would shard a model by other means than its plan: they are refused, with where the same is asked. accelerate
takes one for its own model, and leaves a parallel one as it is; what its methods do from then on (`clip_grad_norm_`,
`save_state`, `get_state_dict`) is for models of the plugin, and on CPUs it drops the plugin.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hetu_fx import Framework, Launcher, is_parallel, named_storages, register_framework, save_file
from hetu_fx.base.patches import PLAN_VARIABLE, Patch, install_patches, register_patch
from hetu_fx.errors import EnvironmentProblem, StateError
from hetu_fx.integrations.patching import patch_what_is_loaded

MARK = "_is_accelerate_prepared"  # accelerate leaves objects with it alone
TO_COME = "to come"  # the mark of a parallel model that has not met an Accelerator yet
ORIGINAL = "_original_forward"  # by which `unwrap_model(model, keep_fp32_wrapper=False)` takes off what was put on


def meet(model: nn.Module) -> None:
    """Have accelerate's `prepare` leave the model as it is, by its mark for prepared objects, but for its precision.

    Raises:
        EnvironmentProblem: there is an Accelerator already, which takes each process for the only one.
        StateError: it has a plugin that shards models.
    """
    from accelerate.state import AcceleratorState, is_initialized

    if is_initialized():
        state = AcceleratorState()
        check_processes(state.num_processes)
        check_plugins(state)
    if MARK not in vars(model):
        object.__setattr__(model, MARK, TO_COME)
    vars(model).pop(ORIGINAL, None)  # of a model prepared before: what it had been wrapped in was captured with it
    patch_what_is_loaded()


def check_processes(counted: int) -> None:
    """Refuse processes that accelerate takes for jobs of one process each, as it does on CPUs unless it is told.

    Raises:
        EnvironmentProblem: on every rank.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if counted == 1 and world > 1:
        raise EnvironmentProblem(
            f"accelerate takes each of the {world} processes for the only one (number 0 of 1). All of them would read "
            f"the same rows and write the same files\n"
            f"hint: on CPUs, use Accelerator(cpu=True), TrainingArguments(use_cpu=True), or ACCELERATE_USE_CPU=1 in "
            f"the environment of the launch: 'ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 SCRIPT' or "
            f"'{TWO_PROCESSES}'. In a notebook, set os.environ['ACCELERATE_USE_CPU'] = '1' before notebook_launcher"
        )


def _with_precision(prepare_model: Callable[..., Any]) -> Callable[..., Any]:
    """Make `prepare_model` ask parallel models for the precision; those of accelerators made before do too."""

    @functools.wraps(prepare_model)
    def with_precision(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare_model(self, model, *args, **kwargs)
        if is_parallel(model):
            check_processes(self.num_processes)
            check_plugins(self.state)
            patch_what_is_loaded()
            _warn_of_comm_hook(self)
            _warn_of_compiler(self)
        if getattr(model, MARK, None) == TO_COME:
            ask_for_precision(self, model)
        return prepared

    return with_precision


def ask_for_precision(accelerator: Any, model: nn.Module) -> None:
    """Run a model's forward under the accelerator's autocast, and give its outputs in float32, as `prepare_model` does.

    Raises:
        StateError: the model is not parallel yet, or mixed precision is fp8, whose layers are others than those that
            were captured.
    """
    if not hasattr(model, "hetu"):
        raise StateError(
            "accelerate prepares this model before its first call, which would make it parallel\nhint: give "
            "hetu_fx.auto_parallelize an example batch, hetu_fx.auto_parallelize(model, batch)"
        )
    _run_in_precision(accelerator, model)


def _run_in_precision(accelerator: Any, model: nn.Module) -> None:
    from accelerate.utils import convert_outputs_to_fp32, get_mixed_precision_context_manager

    if accelerator.mixed_precision == "fp8":
        raise StateError(
            "Accelerator(mixed_precision='fp8') puts other layers in the model, after hetu_fx.auto_parallelize has "
            "captured it\nhint: use mixed_precision='bf16'"
        )
    object.__setattr__(model, MARK, True)
    if not accelerator.native_amp:
        return
    autocast = get_mixed_precision_context_manager(accelerator.native_amp, accelerator.autocast_handler)
    object.__setattr__(model, ORIGINAL, model.forward)
    forward = convert_outputs_to_fp32(autocast(model.forward.__func__))  # type: ignore[attr-defined]
    object.__setattr__(model, "forward", MethodType(forward, model))


def _parallelize_by_environment(accelerator: Any, given: Sequence[Any]) -> None:
    """Make models that have something to train parallel at their first call, by the plan that HETU_FX_PLAN names."""
    from hetu_fx import auto_parallelize

    for model in [one for one in given if isinstance(one, nn.Module) and MARK not in vars(one)]:
        own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        if own:
            if accelerator.device_placement:
                model.to(accelerator.device)
            _run_in_precision(accelerator, model)
            optimizers = [one for one in given if isinstance(one, Optimizer) and own & set(_held_by(one))]
            auto_parallelize(model, optimizer=next(iter(optimizers), None))


def _held_by(optimizer: Optimizer) -> Iterator[int]:
    return (id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _without_plugins(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Make `prepare` refuse plugins before it takes a parallel model apart for them."""

    @functools.wraps(prepare)
    def without_plugins(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get(PLAN_VARIABLE):
            _parallelize_by_environment(self, args)
        if any(map(is_parallel, args)):
            check_plugins(self.state)
        return prepare(self, *args, **kwargs)

    return without_plugins


def _warn_of_comm_hook(accelerator: Any) -> None:
    """Say that what DistributedDataParallel was to send gradients by is not used for parallel models."""
    from accelerate.utils import DDPCommunicationHookType

    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook is not DDPCommunicationHookType.NO:
        warnings.warn(
            f"DistributedDataParallelKwargs(comm_hook='{handler.comm_hook.value}') is not used: hetu_fx sends "
            "gradients of parallel models in their own type\nhint: leave comm_hook out",
            stacklevel=4,
        )


def _warn_of_compiler(accelerator: Any) -> None:
    """Say that the compiler asked for is not used: accelerate would compile what it has wrapped itself."""
    from accelerate.utils import DynamoBackend

    backend = accelerator.state.dynamo_plugin.backend
    if backend is not DynamoBackend.NO:
        warnings.warn(
            f"Accelerator(dynamo_backend='{backend.value.lower()}'), or TrainingArguments(torch_compile=True), is not "
            "used for parallel models\nhint: pass compile= to hetu_fx.auto_parallelize",
            stacklevel=4,
        )


def _refusing_parallel_models(enter: Callable[..., Any]) -> Callable[..., Any]:
    """Make `LocalSGD` refuse parallel models, whose parameters no process has for itself."""

    @functools.wraps(enter)
    def refusing_parallel_models(self: Any) -> Any:
        if self.enabled and hasattr(self.model, "hetu"):
            raise StateError(
                "LocalSGD trains one model per rank and averages them after a few steps, but a parallel model is one "
                "model on all ranks\nhint: leave LocalSGD out, or pass enabled=False"
            )
        return enter(self)

    return refusing_parallel_models


def torch_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return what accelerate has wrapped, as its wrapper has no hooks of its own."""
    wrapped: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return wrapped


TWO_PROCESSES = "ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 --num_machines 1 SCRIPT"

register_framework(
    Framework(
        name="accelerate",
        adopt=meet,
        torch_optimizer=torch_optimizer,
        launcher=Launcher("accelerate launch", "ACCELERATE_MIXED_PRECISION", TWO_PROCESSES),
    )
)

register_patch(
    Patch(
        "accelerate", "accelerate.accelerator", "Accelerator", "prepare_model",
        why="mixed_precision= would be left out of models that are prepared already, as parallel ones are",
        tested="1.15",
        wrap=_with_precision,
    )
)  # fmt: skip
register_patch(
    Patch(
        "accelerate", "accelerate.accelerator", "Accelerator", "prepare",
        why="plugins for FSDP2, DeepSpeed, Megatron-LM and tensor parallelism would take parallel models apart",
        tested="1.15",
        wrap=_without_plugins,
    )
)  # fmt: skip
_WHOLE = "a parallel model would be held as a whole by the rank that saves it"
for _name in ("save_model", "save_state"):
    register_patch(
        Patch("accelerate", "accelerate.accelerator", "Accelerator", _name, _WHOLE, "1.15", named_storages())
    )
register_patch(Patch("accelerate", "accelerate.utils.other", "", "safe_save_file", _WHOLE, "1.15", lambda _: save_file))
register_patch(
    Patch(
        "accelerate", "accelerate.local_sgd", "LocalSGD", "__enter__",
        why="LocalSGD would average the pieces of parallel models' parameters",
        tested="1.15",
        wrap=_refusing_parallel_models,
    )
)  # fmt: skip


@dataclass(frozen=True)
class Plugin:
    """A plugin of `Accelerator`.

    Attributes:
        given: how scripts ask for it.
        variable: of the environment, by which a launch asks for it, and which accelerate sets where it is given.
        ways: where its options are asked for with hetu_fx, by what they are for.
    """

    given: str
    variable: str
    ways: tuple[tuple[str, str], ...]


_PRECISION = "Accelerator(mixed_precision='bf16')"
_RECOMPUTE = "a stage's 'recompute' in the plan"
_GROUPS = "stages' 'devices' and pipelines in the plan"
_SAVED = "accelerator.save_state, save_model and get_state_dict, which write the whole model"
_CLIPPED = "accelerator.clip_grad_norm_"

PLUGINS = (
    Plugin(
        "Accelerator(fsdp_plugin=...), TrainingArguments(fsdp=...)",
        "ACCELERATE_USE_FSDP",
        (
            ("sharding", "'zero': 1 in the plan, its default"),
            ("wrapping, prefetching and loading on one process", "nothing to ask for"),
            ("mixed_precision_policy", _PRECISION),
            ("activation_checkpointing", _RECOMPUTE),
            ("state_dict_type", _SAVED),
            ("cpu_offload and ignored_modules", "not there"),
        ),
    ),
    Plugin(
        "Accelerator(deepspeed_plugin=...), TrainingArguments(deepspeed=...)",
        "ACCELERATE_USE_DEEPSPEED",
        (
            ("zero_stage", "'zero' in the plan"),
            ("gradient_accumulation_steps", "Accelerator(gradient_accumulation_steps=...)"),
            ("gradient_clipping", _CLIPPED),
            ("precision", _PRECISION),
            ("offloading, and an optimizer or a schedule of its configuration file", "not there"),
        ),
    ),
    Plugin(
        "Accelerator(megatron_lm_plugin=...)",
        "ACCELERATE_USE_MEGATRON_LM",
        (
            ("degrees and micro-batches", _GROUPS),
            ("sequence_parallelism", "'sequence_parallel' in the plan"),
            ("recomputation", _RECOMPUTE),
            ("use_distributed_optimizer", "'zero': 1 in the plan, its default"),
            ("gradient_clipping", _CLIPPED),
            ("its own models, schedules and data", "not there"),
        ),
    ),
)

SIZES = {
    "dp_replicate": "pipelines in the plan",
    "dp_shard": "'zero': 1 in the plan, its default",
    "tp": "stages of several 'devices' in the plan",
    "cp": "a stage's 'context' in the plan",
    "sp": "a stage's 'context' in the plan, with 'attention': 'heads'",
}
"""The sizes of a `ParallelismConfig`, and where the same is asked for with hetu_fx."""


def check_plugins(state: Any) -> None:
    """Refuse an accelerator whose plugins would shard a parallel model once more; `state` is an `AcceleratorState`.

    Raises:
        StateError: on every rank, as all are launched alike.
    """
    asked = [plugin for plugin in PLUGINS if os.environ.get(plugin.variable, "false").lower() == "true"]
    for plugin in asked:
        ways = "; ".join(f"{option}: {way}" for option, way in plugin.ways)
        raise StateError(
            f"{plugin.given} or {plugin.variable}=true of the launch shards models by other means than the plan of a "
            f"parallel model\nhint: leave it out. With hetu_fx: {ways}"
        )
    sizes = list(_sizes(getattr(state, "parallelism_config", None)))
    if sizes:
        told = "; ".join(f"{name}_size={size}: {SIZES[name]}" for name, size in sizes)
        raise StateError(
            f"Accelerator(parallelism_config=...) asks for sizes of its own, and a parallel model runs as its plan "
            f"says\nhint: leave it out. With hetu_fx: {told}"
        )


def _sizes(config: Any) -> Iterator[tuple[str, int]]:
    """Yield what a `ParallelismConfig` asks for; accelerate counts processes as replicas where nothing is asked for."""
    sizes = {} if config is None else {name: getattr(config, f"{name}_size") for name in SIZES}
    others = any(size > 1 for name, size in sizes.items() if name != "dp_replicate")
    yield from ((name, size) for name, size in sizes.items() if size > 1 and (others or name != "dp_replicate"))


if os.environ.get(PLAN_VARIABLE):
    install_patches("accelerate")  # where it is loaded: with it this module is imported then
