"""Automatic parallelization for PyTorch on unequal devices.

    model = hetu_fx.auto_parallelize(model, batch)

Names are imported when first used, so that tools which need no torch start fast.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hetu_fx.base.frameworks import import_with_library, offer, warn_of_newer
from hetu_fx.base.memory import without_collections
from hetu_fx.base.patches import PLAN_VARIABLE

if TYPE_CHECKING:
    from hetu_fx.api import auto_parallelize as auto_parallelize
    from hetu_fx.api import is_parallel as is_parallel
    from hetu_fx.base.device_types import DeviceType as DeviceType
    from hetu_fx.base.frameworks import Framework as Framework
    from hetu_fx.base.frameworks import Launcher as Launcher
    from hetu_fx.base.frameworks import WeightNames as WeightNames
    from hetu_fx.base.frameworks import register_framework as register_framework
    from hetu_fx.batches.sampler import Pieces as Pieces
    from hetu_fx.batches.sampler import TokenBudgetSampler as TokenBudgetSampler
    from hetu_fx.batches.sampler import nested_batch as nested_batch
    from hetu_fx.checkpoint.staging import PartsStager as PartsStager
    from hetu_fx.checkpoint.tensor_files import save_file as save_file
    from hetu_fx.cluster.cluster import Cluster as Cluster
    from hetu_fx.comm_ops.wire.objects.messages import broadcast_object as broadcast_object
    from hetu_fx.deduction.rules.registry import register_rule as register_rule
    from hetu_fx.errors import HetuFxError as HetuFxError
    from hetu_fx.graph.leaves.mark import leaf as leaf
    from hetu_fx.handle import Handle as Handle
    from hetu_fx.planner.api import measure as measure
    from hetu_fx.planner.api import plan as plan
    from hetu_fx.planner.api import profile as profile
    from hetu_fx.planner.api import simulate as simulate
    from hetu_fx.planner.dispatch.assignment import Batching as Batching
    from hetu_fx.planner.dispatch.policies import EarliestFinish as EarliestFinish
    from hetu_fx.planner.dispatch.policies import HotSPa as HotSPa
    from hetu_fx.planner.dispatch.policies import Hydraulis as Hydraulis
    from hetu_fx.planner.measure.block_times import Measuring as Measuring
    from hetu_fx.planner.values.profile_file import Profile as Profile
    from hetu_fx.plans.plan import Pipeline as Pipeline
    from hetu_fx.plans.plan import Plan as Plan
    from hetu_fx.plans.plan import Stage as Stage
    from hetu_fx.program.loss_type import LossType as LossType
    from hetu_fx.switching.home.memory import named_storages as named_storages
    from hetu_fx.switching.home.ops import full_tensor as full_tensor
    from hetu_fx.switching.sequences.reader import SequenceOptions as SequenceOptions
    from hetu_fx.switching.settings import Options as Options

_HOMES = {
    "Batching": "hetu_fx.planner.dispatch.assignment",
    "Cluster": "hetu_fx.cluster.cluster",
    "DeviceType": "hetu_fx.base.device_types",
    "Framework": "hetu_fx.base.frameworks",
    "Handle": "hetu_fx.handle",
    "HetuFxError": "hetu_fx.errors",
    "HotSPa": "hetu_fx.planner.dispatch.policies",
    "Hydraulis": "hetu_fx.planner.dispatch.policies",
    "Launcher": "hetu_fx.base.frameworks",
    "LossType": "hetu_fx.program.loss_type",
    "Measuring": "hetu_fx.planner.measure.block_times",
    "Options": "hetu_fx.switching.settings",
    "PartsStager": "hetu_fx.checkpoint.staging",
    "Pieces": "hetu_fx.batches.sampler",
    "Pipeline": "hetu_fx.plans.plan",
    "Plan": "hetu_fx.plans.plan",
    "Profile": "hetu_fx.planner.values.profile_file",
    "SequenceOptions": "hetu_fx.switching.sequences.reader",
    "EarliestFinish": "hetu_fx.planner.dispatch.policies",
    "Stage": "hetu_fx.plans.plan",
    "TokenBudgetSampler": "hetu_fx.batches.sampler",
    "WeightNames": "hetu_fx.base.frameworks",
    "auto_parallelize": "hetu_fx.api",
    "broadcast_object": "hetu_fx.comm_ops.wire.objects.messages",
    "full_tensor": "hetu_fx.switching.home.ops",
    "is_parallel": "hetu_fx.api",
    "leaf": "hetu_fx.graph.leaves.mark",
    "measure": "hetu_fx.planner.api",
    "named_storages": "hetu_fx.switching.home.memory",
    "nested_batch": "hetu_fx.batches.sampler",
    "plan": "hetu_fx.planner.api",
    "profile": "hetu_fx.planner.api",
    "register_framework": "hetu_fx.base.frameworks",
    "register_rule": "hetu_fx.deduction.rules.registry",
    "save_file": "hetu_fx.checkpoint.tensor_files",
    "simulate": "hetu_fx.planner.api",
}

__all__ = [*sorted(_HOMES)]

warn_of_newer()
offer("hetu_fx.integrations.transformers", "hetu_fx.integrations.accelerate")
import_with_library(
    "lightning.pytorch.strategies",
    "hetu_fx.integrations.lightning.registered",
    why='Trainer(strategy="hetu_fx") would be unknown',
    tested="2.6",
)
import_with_library(
    "torch.export.pt2_archive",
    "hetu_fx.export.known_ops",
    why="torch.export.load would not know the ops of exported graphs",
    tested="2.13",
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hetu_fx' has no attribute {name!r}")
    return getattr(_imported(_HOMES[name]), name)


def _imported(module: str) -> ModuleType:
    """Import a module without looking for garbage: there is none, and to import torch takes a sixth longer with it."""
    start, is_first = perf_counter(), module not in sys.modules
    with without_collections():
        found = import_module(module)
    if is_first and "IMPORT_SECONDS" in vars(found):
        vars(found)["IMPORT_SECONDS"] = perf_counter() - start
    return found


def __dir__() -> list[str]:
    return [*__all__, *globals()]


if os.environ.get(PLAN_VARIABLE):  # it imports names from here
    import_with_library(
        "accelerate.accelerator",
        "hetu_fx.integrations.accelerate",
        why=f"{PLAN_VARIABLE} makes models of an Accelerator parallel without a line in the script",
        tested="1.15",
    )
