"""Ops that act on the pieces of home tensors: point-wise ones, copies, factories, and list kernels (foreach, fused).

List kernels are what optimizers spend their time in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hetu_fx.base.torch_private import (
    argument_names,
    increment_version,
    overload_name,
    schema,
)
from hetu_fx.comm_ops.wire.collectives import reduce_world
from hetu_fx.errors import StateError
from hetu_fx.switching.home.gathered import named_arguments, run_whole
from hetu_fx.switching.home.journal import NAMED, journal
from hetu_fx.switching.home.layout import HomeLayout, home_layout
from hetu_fx.switching.home.tensor import (
    MADE_OF,
    OPS,
    Handler,
    HomeTensor,
    cut_like,
    gather_whole,
    home_layout_of,
    local_of,
    mark_written,
    same_layout,
    wrap,
)

aten = torch.ops.aten
CAST = "cast"
"""Names a copy in another dtype among what tensors are made by."""


def find_local(func: Any) -> Handler | None:
    """Recognise point-wise ops by their tag, and list kernels by their name."""
    name = schema(func).name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")):
        return _run_lists
    if torch.Tag.pointwise in func.tags or name in _POINTWISE_WITHOUT_TAG:
        return _pointwise(func, in_place=name.endswith("_"))
    return None


_POINTWISE_WITHOUT_TAG = {"zero_", "fill_", "masked_fill", "masked_fill_", "zero", "fill"}


def is_pointwise(func: Any) -> bool:
    """Tell whether an op of torch makes new elements, each of those in its place alone, and not by chance."""
    is_of_torch = str(func).startswith("aten.") and not schema(func).is_mutable
    return is_of_torch and torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags


def _fast(func: Any) -> Any:
    """Prefer the plain method, whose argument parsing costs a third of the overload's."""
    packet = schema(func).name.removeprefix("aten::")
    return _METHODS.get((packet, overload_name(func)), func)


# Overloads whose positional and keyword arguments are those of the method.
_METHODS: dict[tuple[str, str], Callable[..., Any]] = {
    (name, overload): getattr(torch.Tensor, name)
    for name, overloads in {
        "add": ("Tensor",),
        "add_": ("Tensor",),
        "addcdiv_": ("default",),
        "addcmul_": ("default",),
        "div": ("Tensor", "Scalar"),
        "div_": ("Tensor", "Scalar"),
        "lerp_": ("Scalar", "Tensor"),
        "mul": ("Tensor", "Scalar"),
        "mul_": ("Tensor", "Scalar"),
        "sqrt": ("default",),
        "sub_": ("Tensor",),
        "zero_": ("default",),
    }.items()
    for overload in overloads
}


def _pointwise(func: Any, *, in_place: bool) -> Handler:
    run = _fast(func)

    def handler(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout, pieces = _pieces(args)
        if layout is None or _has_tensor(kwargs) or not (layout.shape or in_place):
            return _pointwise_mixed(func, args, kwargs)
        result = run(*pieces, **kwargs)
        if in_place:
            increment_version((args[0].local,))  # torch counts the write to the wrapper, and not that to its piece
            return args[0]
        made = wrap(result, layout)
        if not kwargs and layout.world > 1:
            OPS.reads.note_made(made, func, args)
        return made

    return handler


def _pieces(args: tuple[Any, ...]) -> tuple[HomeLayout | None, list[Any]]:
    """Unwrap arguments of one layout, or say None: layouts differ, or a plain tensor has to be cut."""
    layout = None
    pieces = []
    for arg in args:
        if type(arg) is HomeTensor:
            if layout is None:
                layout = arg.home_layout
            elif arg.home_layout is not layout:
                return None, pieces
            pieces.append(arg.local)
        elif isinstance(arg, torch.Tensor) and arg.dim():
            return None, pieces
        else:
            pieces.append(arg)
    return layout, pieces


def _has_tensor(kwargs: dict[str, Any]) -> bool:
    return bool(kwargs) and any(isinstance(value, torch.Tensor) for value in kwargs.values())


def _pointwise_mixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bring every operand to one home layout (that of the target, if one is written), if the shape stays.

    A new value made of a scalar and plain tensors is made whole: an absent piece, of shape (0,), would be
    promoted to another dtype than the scalar itself.
    """
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    target = kwargs.get("out", args[0] if schema(func).name.endswith("_") else None)
    leader = next(t for t in tensors if type(t) is HomeTensor) if target is None else target
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    promotes = not shape and target is None and any(type(tensor) is not HomeTensor for tensor in tensors)
    if type(leader) is not HomeTensor or promotes or shape != leader.shape:
        return run_whole(func, args, kwargs)
    layout = leader.home_layout
    pieces = [cut_like(arg, layout) if isinstance(arg, torch.Tensor) else arg for arg in args]
    kwargs = {k: cut_like(v, layout) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    result = func(*pieces, **kwargs)
    if target is None:
        made = wrap(result, layout)
        if not kwargs and all(type(tensor) is HomeTensor and tensor.home_layout is layout for tensor in tensors):
            OPS.reads.note_made(made, func, args)
        return made
    mark_written([target])
    _note_plain(target, tensors)
    return target


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HomeTensor:
    home = args[0]
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        made = wrap(home.local, home.home_layout)  # a view of a tensor that counts its writes counts them too
    vars(made).update((told, vars(home)[told]) for told in (MADE_OF, NAMED) if told in vars(home))
    return made


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HomeTensor:
    made = _like(func, args, kwargs)
    journal().note_copy(args[0], args[0].local, made.local, made.home_layout)
    if made.home_layout.world > 1:
        OPS.reads.note_made(made, CAST, (args[0], str(made.dtype)))
    return made


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HomeTensor:
    return wrap(func(args[0].local, *args[1:], **kwargs), args[0].home_layout)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Make a new tensor: a home tensor where it has the global shape, else a plain one on every rank."""
    home, size, *rest = args
    if tuple(size) != home.home_layout.shape:
        return func(home.local, size, *rest, **kwargs)  # type: ignore[no-any-return]
    return wrap(func(home.local, home.home_layout.local_shape, *rest, **kwargs), home.home_layout)


def _new_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _new(aten.new_empty.default, (args[0], args[1]), kwargs)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    target, source = args[0], args[1]
    if type(target) is not HomeTensor:
        target.copy_(source.whole())  # as an array is read: by all ranks, or by one alone
        return target  # type: ignore[no-any-return]
    target.local.copy_(cut_like(source, target.home_layout))
    mark_written([target])
    _note_plain(target, [source])
    return target


def _note_plain(target: HomeTensor, operands: Sequence[torch.Tensor]) -> None:
    """Note the whole tensors that a home tensor was written with, which ranks may have unlike."""
    for operand in operands if target.home_layout.world > 1 else ():
        if type(operand) is not HomeTensor and operand.dim():
            journal().write_value(target.local, operand)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views that change nothing keep the layout; any other view shows the gathered tensor."""
    if tuple(args[1]) == args[0].home_layout.shape:
        return _alias(func, args, kwargs)
    return run_whole(func, args, kwargs)


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A scalar as a vector of one element keeps its home (masked assignment makes one)."""
    home = args[0]
    if home.dim():
        return run_whole(func, args, kwargs)
    layout = home.home_layout
    vector = home_layout(layout.annotation, (1,), layout.rank, layout.world)
    return wrap(home.local.view(vector.local_shape), vector)


def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Assign a number where a mask of the same home says (`sign[sign.gt(0)] = 1.2` in Rprop)."""
    home, indices, values = args[0], args[1], args[2]
    mask = indices[0] if len(indices) == 1 else None
    if type(home) is not HomeTensor or type(mask) is not HomeTensor or mask.dtype is not torch.bool:
        return run_whole(func, args, kwargs)
    if mask.home_layout is not home.home_layout or values.dim() or any(args[3:]):
        return run_whole(func, args, kwargs)
    home.local.masked_fill_(mask.local, values)
    mark_written([home])
    return home


def _run_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a list kernel (foreach, fused) on the pieces, position by position.

    A position whose written tensor is plain runs whole: its home operands are gathered.
    """
    given, written = named_arguments(func, args, kwargs), argument_names(func).written
    lists = {name: given[name] for name in argument_names(func).lists_of_tensors if given.get(name)}
    alike = _cut_alike(lists)
    layouts, cuts = alike or _cut_by_position(lists, written)
    pieces = [cuts.get(name, value) for name, value in zip(argument_names(func).all, args, strict=False)]
    results = func(*pieces, **{name: cuts.get(name, value) for name, value in kwargs.items()})
    targets = [(i, t) for name in written if name in lists for i, t in enumerate(lists[name]) if type(t) is HomeTensor]
    mark_written([target for _, target in targets])
    for position, target in () if alike else targets:
        _note_plain(target, [tensors[position] for name, tensors in lists.items() if name not in written])
    if results is None:
        return None
    return [r if layout is None else wrap(r, layout) for r, layout in zip(results, layouts, strict=True)]


_Cut = tuple[Sequence[HomeLayout | None], dict[str, Sequence[torch.Tensor]]]
"""The layouts that a list kernel runs in by position (None: whole), and its lists as that needs them."""


def _cut_alike(lists: dict[str, Any]) -> _Cut | None:
    """Cut lists of home tensors that agree in their layouts, besides lists of numbers, as in every optimizer.

    Asked first because it is cheap: a step makes ten such calls over all parameters.
    """
    found = layouts_alike(lists.values())
    if found is None:
        return None
    layouts, are_homes = found
    each = zip(lists.items(), are_homes, strict=True)
    return layouts, {name: list(map(local_of, tensors)) if here else tensors for (name, tensors), here in each}


def layouts_alike(lists: Collection[Sequence[Any]]) -> tuple[list[HomeLayout], list[bool]] | None:
    """Return the layouts in which all lists of home tensors agree, besides lists of numbers, and which lists these are.

    None where there are none, where they do not agree, or where whole tensors stand beside them.
    """
    are_homes = [set(map(type, tensors)) == {HomeTensor} for tensors in lists]
    layouts = [list(map(home_layout_of, tensors)) for tensors, here in zip(lists, are_homes, strict=True) if here]
    are_whole = (not here and not _are_numbers(tensors) for tensors, here in zip(lists, are_homes, strict=True))
    if not layouts or any(one != layouts[0] for one in layouts) or any(are_whole):
        return None
    return layouts[0], are_homes


def _cut_by_position(lists: dict[str, Any], written: Collection[str]) -> _Cut:
    layouts = [_layout_at(i, lists, written) for i in range(len(next(iter(lists.values()))))]
    return layouts, {name: list(map(_cut_item, tensors, layouts)) for name, tensors in lists.items()}


def _are_numbers(tensors: Sequence[object]) -> bool:
    """Tell whether a list has plain tensors of one element each, such as the steps that fused optimizers count."""
    return all(type(tensor) is torch.Tensor and not tensor.dim() for tensor in tensors)


def _layout_at(position: int, lists: dict[str, Any], written: Collection[str]) -> HomeLayout | None:
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


def _cut_item(value: torch.Tensor, layout: HomeLayout | None) -> torch.Tensor:
    if layout is not None:
        return cut_like(value, layout)
    return gather_whole([value])[0] if type(value) is HomeTensor else value


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients; found_inf is that of all ranks, so that all skip the same steps."""
    gradients, found_inf = args[0], args[1]
    func([g.local if type(g) is HomeTensor else g for g in gradients], found_inf, *args[2:], **kwargs)
    mark_written([g for g in gradients if type(g) is HomeTensor])
    world = next(g.home_layout.world for g in gradients if type(g) is HomeTensor)
    reduce_world(found_inf, world, dist.ReduceOp.MAX, "whether gradients are finite")


LOCAL_OPS: dict[Any, Handler] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.view.default: _view,
    aten.expand.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.index_put_.default: _index_put,
    aten._to_copy.default: _copied,
    aten.clone.default: _copied,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    aten.empty_like.default: _like,
    aten.full_like.default: _like,
    aten.new_empty.default: _new,
    aten.new_zeros.default: _new,
    aten.new_ones.default: _new,
    aten.new_full.default: _new,
    aten.new_empty_strided.default: _new_strided,
    aten.copy_.default: _copy,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
