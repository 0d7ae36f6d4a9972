"""Automatic parallelization for PyTorch on unequal devices.

    model = hetu_fx.auto_parallelize(model, batch)

Names are imported when first used, so that tools which need no torch start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetu_fx.api import auto_parallelize as auto_parallelize
    from hetu_fx.deduction.registry import register_rule as register_rule
    from hetu_fx.errors import HetuFxError as HetuFxError
    from hetu_fx.handle import Handle as Handle
    from hetu_fx.nested_batches import nested_batch as nested_batch
    from hetu_fx.planner.hydraulis.assignment import Batching as Batching
    from hetu_fx.planner.hydraulis.policies import HotSPa as HotSPa
    from hetu_fx.planner.hydraulis.policies import Hydraulis as Hydraulis
    from hetu_fx.planner.hydraulis.policies import Soonest as Soonest
    from hetu_fx.planner.profile_file import Profile as Profile
    from hetu_fx.planning import plan as plan
    from hetu_fx.planning import profile as profile
    from hetu_fx.plans import Pipeline as Pipeline
    from hetu_fx.plans import Plan as Plan
    from hetu_fx.plans import Stage as Stage
    from hetu_fx.profiling import Measuring as Measuring
    from hetu_fx.sequences import Pieces as Pieces
    from hetu_fx.sequences import TokenBudgetSampler as TokenBudgetSampler
    from hetu_fx.simulating import simulate as simulate
    from hetu_fx.switching.sequence_form import SequenceOptions as SequenceOptions
    from hetu_fx.topology import Cluster as Cluster

_HOMES = {
    "Batching": "hetu_fx.planner.hydraulis.assignment",
    "Cluster": "hetu_fx.topology",
    "Handle": "hetu_fx.handle",
    "HetuFxError": "hetu_fx.errors",
    "HotSPa": "hetu_fx.planner.hydraulis.policies",
    "Hydraulis": "hetu_fx.planner.hydraulis.policies",
    "Measuring": "hetu_fx.profiling",
    "Pieces": "hetu_fx.sequences",
    "Pipeline": "hetu_fx.plans",
    "Plan": "hetu_fx.plans",
    "Profile": "hetu_fx.planner.profile_file",
    "SequenceOptions": "hetu_fx.switching.sequence_form",
    "Soonest": "hetu_fx.planner.hydraulis.policies",
    "Stage": "hetu_fx.plans",
    "TokenBudgetSampler": "hetu_fx.sequences",
    "auto_parallelize": "hetu_fx.api",
    "nested_batch": "hetu_fx.nested_batches",
    "plan": "hetu_fx.planning",
    "profile": "hetu_fx.planning",
    "register_rule": "hetu_fx.deduction.registry",
    "simulate": "hetu_fx.simulating",
}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hetu_fx' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *globals()]
