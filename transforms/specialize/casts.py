"""What a stage with a dtype casts: what torch.autocast casts on the host, whatever device runs the stage.

Lists of casts differ between types of devices; by one list, the devices of a stage cast alike whatever they are, and
what they sum has one dtype. Which list an op is on says its kernel: it is called with the example's values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hetu_fx.base.device_types import HOST, DeviceType
from hetu_fx.base.dtypes import autocast_casts
from hetu_fx.base.low_dtypes import STAGE_DTYPES
from hetu_fx.base.torch_private import detect_fake_mode, tree_leaves, tree_map, tree_map_only
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.regions import has_autocast_kernel
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph

DTYPES = {name: getattr(torch, name) for name in STAGE_DTYPES}


def cast_target(node: fx.Node, low: torch.dtype) -> torch.dtype | None:
    """Return what torch.autocast to `low` casts the operands of an op to: `low`, float32, or None: it leaves them."""
    if meta.forbids_casts(node) or not has_autocast_kernel(node.target, HOST.type):
        return None
    args, kwargs = tree_map(_example, (node.args, dict(node.kwargs)))
    if not any(map(is_castable, tree_leaves((args, kwargs)))):
        return None
    if _made(node, args, kwargs, low) == low:
        return low
    args, kwargs = tree_map_only(Tensor, lambda x: x.to(low) if is_castable(x) else x, (args, kwargs))
    return torch.float32 if _made(node, args, kwargs, low) == torch.float32 else None


def is_castable(value: Any) -> bool:
    """Tell whether autocast casts a value: floating point, but for float64."""
    return isinstance(value, Tensor) and autocast_casts(value.dtype)


def check_casts(annotated: AnnotatedGraph, *, talks: bool) -> None:
    """Raise `PlanError` where stages of unlike dtypes would sum over replicas in the middle of the model."""
    dtypes = {stage.dtype for *_, stage in annotated.plan.stages}
    if talks and len(dtypes) > 1:
        names = sorted(dtype or "none" for dtype in dtypes)
        raise PlanError(
            f"stages have dtypes {', '.join(names)}, but replicas of this model sum in the middle of it (BatchNorm, a "
            f"loss over all rows), which would mix them\nhint: give all stages one dtype, or leave it out"
        )


def check_computes(kind: DeviceType, dtype: str | None, rank: int) -> None:
    """Raise `PlanError` where a type of devices does not compute in a stage's dtype."""
    if dtype is not None and DTYPES[dtype] in kind.no_dtypes:
        raise PlanError(
            f"the stage of rank {rank} has dtype {dtype!r}, in which devices of type {kind.name!r} do not compute"
            f"\nhint: leave it out of this stage, or give the stage other devices"
        )


def _example(argument: Any) -> Any:
    return meta.value(argument) if isinstance(argument, fx.Node) else argument


def _made(node: fx.Node, args: Any, kwargs: Any, low: torch.dtype) -> torch.dtype:
    """Return the dtype of what an op makes under autocast."""
    assert callable(node.target)
    mode = detect_fake_mode(tree_leaves((args, kwargs)))
    assert mode is not None, "a captured graph has fake example values"
    with mode, torch.no_grad(), torch.autocast(HOST.type, dtype=low):
        made = tree_leaves(node.target(*args, **kwargs))
    dtype: torch.dtype = next(one.dtype for one in made if isinstance(one, Tensor))
    return dtype
