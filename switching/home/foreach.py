"""List kernels (foreach, fused) on the pieces of home tensors: what optimizers spend their time in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hetu_fx.base.torch_private import schema, written_names
from hetu_fx.comm_ops.wire.collectives import reduce_world
from hetu_fx.errors import StateError
from hetu_fx.switching.home.layout import HomeLayout
from hetu_fx.switching.home.tensor import HomeTensor, cut_like, gather_whole, mark_written, same_layout, wrap


def run_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a list kernel (foreach, fused) on the pieces, position by position.

    A position whose written tensor is plain runs whole: its home operands are gathered.
    """
    lists = {name: value for name, value in _named(func, args, kwargs).items() if _is_list(value)}
    written = set(written_names(func))
    layouts = _common_layouts(lists)
    if layouts is not None:
        results = func(*map(_locals, args), **{k: _locals(v) for k, v in kwargs.items()})
    else:
        layouts = [_layout_at(i, lists, written) for i in range(len(args[0]))]
        cut_args = [_cut_list(arg, layouts) if _is_list(arg) else arg for arg in args]
        results = func(*cut_args, **{k: _cut_list(v, layouts) if _is_list(v) else v for k, v in kwargs.items()})
    mark_written([t for name in written & lists.keys() for t in lists[name] if type(t) is HomeTensor])
    if results is None:
        return None
    return [r if layout is None else wrap(r, layout) for r, layout in zip(results, layouts, strict=True)]


def _common_layouts(lists: dict[str, Any]) -> Sequence[HomeLayout | None] | None:
    """Give the layouts by position if all lists are of home tensors that agree in them, as in every optimizer.

    Asked first because it is cheap: a step makes ten such calls over all parameters.
    """
    found = [[tensor.home_layout for tensor in tensors] for tensors in lists.values() if _all_home(tensors)]
    return found[0] if len(found) == len(lists) and all(other == found[0] for other in found) else None


def _all_home(tensors: Sequence[Any]) -> bool:
    return all(type(tensor) is HomeTensor for tensor in tensors)


def _locals(value: Any) -> Any:
    return [tensor.local for tensor in value] if _is_list(value) else value


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**{arg.name: value for arg, value in zip(schema(func).arguments, args, strict=False)}, **kwargs}


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value)


def _layout_at(position: int, lists: dict[str, Any], written: set[str]) -> HomeLayout | None:
    """Give the layout that a position runs in (None: whole), by what is written there."""
    layout = None
    plain_written = False
    for name, tensors in lists.items():
        tensor = tensors[position]
        if type(tensor) is HomeTensor:
            if layout is None:
                layout = tensor.home_layout
            elif name in written and not same_layout(tensor.home_layout, layout):
                raise StateError(
                    f"one kernel writes home tensors of two layouts, {layout.annotation} and "
                    f"{tensor.home_layout.annotation}; bring the state to the layout of its parameter"
                )
        elif name in written and tensor.dim():
            plain_written = True
    return None if plain_written else layout


def _cut_list(values: Sequence[Any], layouts: Sequence[HomeLayout | None]) -> list[Any]:
    return [_cut_item(value, layout) for value, layout in zip(values, layouts, strict=True)]


def _cut_item(value: Any, layout: HomeLayout | None) -> Any:
    if type(value) is HomeTensor:
        if layout is None:
            return gather_whole([value])[0]
        return value.local if value.home_layout is layout else cut_like(value, layout)
    if layout is None or not value.dim():
        return value
    return cut_like(value, layout)


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients; found_inf is that of all ranks, so that all skip the same steps."""
    gradients, found_inf = args[0], args[1]
    # The versions of gradients are nobody's business, so this write is not counted.
    func([g.local if type(g) is HomeTensor else g for g in gradients], found_inf, *args[2:], **kwargs)
    world = next(g.home_layout.world for g in gradients if type(g) is HomeTensor)
    reduce_world(found_inf, world, dist.ReduceOp.MAX)
