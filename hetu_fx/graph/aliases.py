"""What an op writes to, and whose storage its result shares."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from hetu_fx.base.torch_private import OpOverload, schema
from hetu_fx.graph import meta

aten = torch.ops.aten

NEW_STORAGE = frozenset({aten.lift_fresh_copy.default, aten.clone.default, aten._to_copy.default})


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an op writes to, by its schema."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    return [
        given
        for index, argument in enumerate(schema(node.target).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for given in _as_nodes(node.args[index] if index < len(node.args) else node.kwargs.get(argument.name))
    ]


def _as_nodes(argument: Any) -> Iterator[fx.Node]:
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        yield from (item for item in argument if isinstance(item, fx.Node))


def viewed_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument whose storage the node's value shares, if any."""
    if node.op != "call_function":
        return None
    written = written_arguments(node)
    if written:
        return written[0]
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and viewed_argument(source) is None:
        return None  # a result of an op that returns several new tensors
    if node.target in NEW_STORAGE:  # their example values share the storage, the op does not
        return None
    storages = _storages(node)
    return next((arg for arg in node.all_input_nodes if storages & _storages(arg)), None)


def _storages(node: fx.Node) -> set[StorageWeakRef]:
    example = node.meta.get("val") if meta.has_value(node) else None
    tensors = example if isinstance(example, (tuple, list)) else [example]
    return {_storage_key(item) for item in tensors if isinstance(item, torch.Tensor)}


def _storage_key(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
