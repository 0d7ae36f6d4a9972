"""Writes captured graphs as bytes and reads them in another process of the same sources."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import SLoc
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from hetu_fx.base.torch_private import without_guards
from hetu_fx.graph.meta import SYMBOLIC

CANNOT_BE_WRITTEN = (pickle.PicklingError, AttributeError, TypeError, RuntimeError, RecursionError)
"""What pickle raises for what has no name that another process knows."""

CANNOT_BE_READ = (AttributeError, ImportError)
"""What pickle raises for a name that this process does not know: an op, or a module, of the one that wrote."""

_OF_THE_TRACE = ("tracked_fakes", "fake_tensor_cache", "log", "_prev_cache_key")
"""Attributes of a ShapeEnv that graphs do not need, and that no other process can have."""

_MOST_CALLS = 20_000  # values nest as deeply as sizes are made of others


def to_bytes(value: Any) -> bytes:
    """Write a graph, or what graphs are made of.

    Raises:
        CANNOT_BE_WRITTEN: something in it has no name that another process knows.
    """
    file, most = io.BytesIO(), sys.getrecursionlimit()
    sys.setrecursionlimit(max(most, _MOST_CALLS))
    try:
        _Writer(file, pickle.HIGHEST_PROTOCOL).dump(value)
    finally:
        sys.setrecursionlimit(most)
    return file.getvalue()


def from_bytes(written: bytes) -> Any:
    """Read what has been written.

    Raises:
        CANNOT_BE_READ: it names what only the process had that wrote it.
    """
    return pickle.loads(written)


class _Writer(pickle.Pickler):
    """Knows how to write what a graph is made of; arguments of nodes tell other nodes by their numbers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._memories: dict[int, _Memory] = {}
        self._numbers: dict[fx.Graph, dict[fx.Node, int]] = {}
        self._kinds: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (fx.Node, self._node),
            (fx.Graph, self._graph),
            (FakeTensor, self._example),
            (FakeTensorMode, lambda mode: (_mode, (mode.shape_env, mode.allow_non_fake_inputs))),
            (ShapeEnv, _sizes_written),
            (SLoc, lambda place: (SLoc, ("", ""))),  # the stack of a trace, for messages of torch
            (SYMBOLIC, _size_written),
            (OpOverload, lambda op: (_op, (op.namespace, op._opname, op._overloadname))),
        )

    def reducer_override(self, value: Any) -> Any:
        return next((write(value) for kind, write in self._kinds if isinstance(value, kind)), NotImplemented)

    def _numbered(self, graph: fx.Graph) -> dict[fx.Node, int]:
        if graph not in self._numbers:
            self._numbers[graph] = {node: number for number, node in enumerate(graph.nodes)}
        return self._numbers[graph]

    def _node(self, node: fx.Node) -> Any:
        return _node_at, (node.graph, self._numbered(node.graph)[node])

    def _graph(self, graph: fx.Graph) -> Any:
        numbers = self._numbered(graph)

        def told(arguments: Any) -> Any:
            return map_aggregate(arguments, lambda it: _Numbered(numbers[it]) if isinstance(it, fx.Node) else it)

        nodes = [(n.op, n.target, told(n.args), told(n.kwargs), n.name, n.type, dict(n.meta)) for n in graph.nodes]
        return _graph_of, (nodes,)

    def _example(self, value: FakeTensor) -> Any:
        if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise pickle.PicklingError(f"a {type(value).__name__}, {value.layout}, of other memory than its own")
        storage = value.untyped_storage()
        memory = self._memories.setdefault(storage._cdata, _Memory(value.fake_mode, storage.nbytes(), storage))
        form = tuple(value.shape), tuple(value.stride()), value.storage_offset()
        return _example_of, (memory, value.dtype, value.device, *form, value.requires_grad)


class _Memory:
    """What examples that are views of each other share: made once by the process that reads."""

    def __init__(self, mode: FakeTensorMode, size_bytes: Any, storage: Any = None) -> None:
        self.mode, self.size_bytes = mode, size_bytes
        self.storage = storage  # kept, so that no other has its place while this writes
        self.values: Tensor | None = None

    def __reduce__(self) -> Any:
        return _Memory, (self.mode, self.size_bytes)

    def example(self, dtype: torch.dtype, device: torch.device, *form: Any) -> Tensor:
        with without_guards(self.mode), _disable_current_modes():
            if self.values is None:
                self.values = torch.empty(self.size_bytes, dtype=torch.uint8, device="meta")
            values = torch.empty(0, dtype=dtype, device="meta")
            sizes, strides, offset = form
            return FakeTensor(self.mode, values.set_(self.values.untyped_storage(), offset, sizes, strides), device)


@dataclass(frozen=True)
class _Numbered:
    """Stands for a node in arguments of others."""

    number: int


def _graph_of(nodes: list[Any]) -> fx.Graph:
    graph, made = fx.Graph(), list[fx.Node]()

    def read(arguments: Any) -> Any:
        return map_aggregate(arguments, lambda it: made[it.number] if isinstance(it, _Numbered) else it)

    for op, target, args, kwargs, name, kind, known in nodes:
        node = graph.create_node(op, target, read(args), read(kwargs), name, kind)
        assert node.name == name, f"{node.name} was {name}"
        node.meta.update(known)
        made.append(node)
    return graph


def _node_at(graph: fx.Graph, number: int) -> fx.Node:
    return next(islice(graph.nodes, number, None))


def _mode(sizes: ShapeEnv | None, allow_non_fake_inputs: bool) -> FakeTensorMode:
    return FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=allow_non_fake_inputs)


def _sizes_written(sizes: ShapeEnv) -> Any:
    return ShapeEnv, (), {name: value for name, value in vars(sizes).items() if name not in _OF_THE_TRACE}


def _size_written(size: Any) -> Any:
    node = size.node
    return _size, (type(size), node.expr, node.shape_env, node.pytype, node.hint)


def _size(kind: type, *node: Any) -> Any:
    return kind(SymNode(*node))


def _op(space: str, name: str, overload: str) -> OpOverload:
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def _example_of(memory: _Memory, dtype: torch.dtype, device: torch.device, *form: Any) -> Tensor:
    *form, requires_grad = form
    return memory.example(dtype, device, *form).requires_grad_(requires_grad)
