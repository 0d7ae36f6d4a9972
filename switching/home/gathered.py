"""Ops that need whole tensors: gather the home operands, run, and cut results of the global shape again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetu_fx.base.torch_private import (
    argument_names,
    disabled_torch_function,
    is_parameter,
    make_subclass,
    schema,
    tree_leaves,
    tree_map,
)
from hetu_fx.base.torch_private import version as version_of
from hetu_fx.errors import StateError
from hetu_fx.switching.home.journal import journal
from hetu_fx.switching.home.tensor import OPS, HomeTensor, gather_whole, mark_written, wrap

_REDUCTION = getattr(torch.Tag, "reduction", None)  # newer than torch 2.11
_REFUSED = {"resize_", "resize_as_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}


class Origin:
    """The gathered copy that views of a home tensor share, kept equal to the home tensor both ways."""

    __slots__ = ("buffer", "home", "version")

    def __init__(self, home: HomeTensor, buffer: torch.Tensor) -> None:
        self.home, self.buffer, self.version = home, buffer, version_of(home)

    def refresh(self) -> None:
        """Gather again if the home tensor was written since, which all ranks see alike; see `_wholes`."""
        if version_of(self.home) != self.version:
            self.buffer.copy_(_wholes([self.home])[0])
            self.version = version_of(self.home)

    def write_back(self) -> None:
        """Bring what was written to the copy home."""
        self.home.local.copy_(self.home.home_layout.take(self.buffer))
        mark_written([self.home])
        journal().write_value(self.home.local, self.buffer)
        self.version = version_of(self.home)


class WholeView(torch.Tensor):
    """A view of a home tensor: shows the gathered whole, and writing to it writes to the home tensor.

    Any op on it that is no view gives plain tensors. Ops on it may gather: of other tensors than parameters, all ranks
    must make them alike.
    """

    whole: torch.Tensor
    origin: Origin

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op on the gathered copies; what it writes goes home."""
        kwargs = kwargs or {}
        views = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is WholeView]
        for origin in {id(view.origin): view.origin for view in views}.values():
            origin.refresh()
        result = func(*tree_map(_whole, args), **tree_map(_whole, kwargs))
        for leaf in tree_leaves(_written(func, args, kwargs)):
            if type(leaf) is WholeView:
                leaf.origin.write_back()
        same = {id(view.whole): view for view in views}
        if _is_view(func):
            return tree_map(lambda leaf: show(leaf, views[0].origin), result)
        return tree_map(lambda leaf: same.get(id(leaf), leaf), result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.whole)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain tensor that it shows."""
        return self.whole.__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Give the gathered values as an array."""
        self.origin.refresh()
        return self.whole.numpy(force=force)

    def tolist(self) -> Any:
        """Give the gathered values as nested lists."""
        self.origin.refresh()
        return self.whole.tolist()


def show(value: Any, origin: Origin) -> Any:
    """Make a view of `origin`'s copy a view of its home tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    view = make_subclass(WholeView, value)
    view.whole, view.origin = value, origin
    return view


def run_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on gathered operands. Collective: every rank must make the same call.

    Where a rank has asked tensors for their memory (those of a state dict that it writes), it works on that alone.
    """
    if schema(func).name.removeprefix("aten::") in _REFUSED:
        raise StateError(f"{func} cannot be done to a home tensor; assign p.data = new_values instead")
    homes = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is HomeTensor]
    kept = [None if is_parameter(home) else home.kept_whole() for home in homes]
    if all(whole is not None for whole in kept) and not schema(func).is_mutable:
        return func(*tree_map(_kept, args), **tree_map(_kept, kwargs))
    reads = not schema(func).is_mutable and (_is_view(func) or _REDUCTION in func.tags)
    wholes = dict(zip(map(id, homes), _wholes(homes) if reads else gather_whole(homes), strict=True))
    plain_args, plain_kwargs = tree_map(lambda leaf: wholes.get(id(leaf), leaf), (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for leaf in tree_leaves(_written(func, args, kwargs)):
        if type(leaf) is HomeTensor:
            _write_back(leaf, wholes[id(leaf)])
    owners = {id(wholes[id(home)]): (wholes[id(home)], home) for home in homes}
    return tree_map(lambda leaf: _give_back(func, leaf, homes[0], owners), result)


def _wholes(homes: Sequence[HomeTensor]) -> list[torch.Tensor]:
    """Return whole tensors to look at: of parameters, and what was computed of them, without the other ranks."""
    found = [None if home.home_layout.is_whole_everywhere else OPS.reads.expression(home) for home in homes]
    known = [one for one in found if one is not None]
    if len(known) < len(homes):
        return gather_whole(homes)
    return [run.whole(home, of) for home, (run, of) in zip(homes, known, strict=True)]


def _kept(value: Any) -> Any:
    return value.kept_whole() if type(value) is HomeTensor else value


def _write_back(home: HomeTensor, whole: torch.Tensor) -> None:
    if whole is not home.local:
        home.local.copy_(home.home_layout.take(whole))
    mark_written([home])
    if home.home_layout.world > 1:
        journal().write_value(home.local, whole)


def _give_back(func: Any, result: Any, first: HomeTensor, owners: dict[int, tuple[torch.Tensor, HomeTensor]]) -> Any:
    """Turn a result into what the caller sees: the written tensor, a view, a cut piece or a plain tensor."""
    if not isinstance(result, torch.Tensor):
        return result
    if id(result) in owners:
        return owners[id(result)][1]
    if _is_view(func):
        whole = next(whole for whole, home in owners.values() if home is first)
        return result if first.home_layout.is_whole_everywhere else show(result, Origin(first, whole))
    if tuple(result.shape) == first.home_layout.shape and result.dim():
        return wrap(first.home_layout.take(result).contiguous(), first.home_layout)
    return result


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an op by the names in its schema."""
    return dict(zip(argument_names(func).all, args, strict=False)) | kwargs


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """List the arguments that the op's schema says it writes."""
    values = named_arguments(func, args, kwargs)
    return [values[name] for name in argument_names(func).written if name in values]


def _is_view(func: Any) -> bool:
    """Tell whether results share memory with an argument that is not written."""
    return any(ret.alias_info and not ret.alias_info.is_write for ret in schema(func).returns)


def _whole(value: Any) -> Any:
    return value.whole if isinstance(value, WholeView) else value
