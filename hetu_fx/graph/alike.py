"""Find a call that must give the same example value as another: the blocks of a model repeat what they do."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from hetu_fx.graph import meta


def alike_call(node: fx.Node) -> fx.Node | None:
    """Return another call of the node's graph with the same op and arguments that look the same, if there is one.

    Its example value is the node's, too: it depends on how the arguments look. The exception is a size that only
    a batch's values tell: it is another one for every call, so such a call is like none.

    Args:
        node: an op node whose node arguments have example values.
    """
    looks = _looks_of_arguments(node)
    others = node.graph.find_nodes(op=node.op, target=node.target, sort=False)
    return next((other for other in others if _is_usable(other, node) and _looks_of_arguments(other) == looks), None)


def _is_usable(other: fx.Node, node: fx.Node) -> bool:
    return other is not node and meta.has_value(other) and not _is_data_dependent(meta.value(other))


def _is_data_dependent(example: Any) -> bool:
    return any(meta.hint(size) == meta.DATA_DEPENDENT for leaf in tree_leaves(example) for size in _sizes(leaf))


def _sizes(leaf: Any) -> tuple[meta.Size, ...]:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape)
    return (leaf,) if isinstance(leaf, torch.SymInt) else ()


def _looks_of_arguments(node: fx.Node) -> Any:
    return tree_map(_looks, (node.args, node.kwargs))


def _looks(argument: Any) -> Any:
    if not isinstance(argument, fx.Node):
        return type(argument), meta.expression(argument)  # 1, 1.0 and True are equal, and make different results
    example = meta.value(argument)
    if isinstance(example, torch.Tensor):
        sizes, strides = (tuple(meta.expression(size) for size in of) for of in (example.shape, example.stride()))
        return sizes, strides, example.dtype, example.device
    return tree_map(lambda item: (type(item), meta.expression(item)), example)
