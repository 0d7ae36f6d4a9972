"""accelerate's plugins, which would shard a model by other means than its plan: refused, with where the same is asked.

accelerate takes a plugin for its own model, and leaves a parallel one as it is. What its methods do from then on
(`clip_grad_norm_`, `save_state`, `get_state_dict`) is for models of the plugin, and on CPUs it drops the plugin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetu_fx.errors import StateError


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
            f"parallel model; leave it out. What it is asked for has its place: {ways}"
        )
    sizes = list(_sizes(getattr(state, "parallelism_config", None)))
    if sizes:
        told = "; ".join(f"{name}_size={size}: {SIZES[name]}" for name, size in sizes)
        raise StateError(
            f"Accelerator(parallelism_config=...) asks for sizes of its own, and a parallel model runs as its plan "
            f"says; leave it out. What it is asked for has its place: {told}"
        )


def _sizes(config: Any) -> Iterator[tuple[str, int]]:
    """Yield what a `ParallelismConfig` asks for; accelerate counts processes as replicas where nothing is asked for."""
    sizes = {} if config is None else {name: getattr(config, f"{name}_size") for name in SIZES}
    others = any(size > 1 for name, size in sizes.items() if name != "dp_replicate")
    yield from ((name, size) for name, size in sizes.items() if size > 1 and (others or name != "dp_replicate"))
