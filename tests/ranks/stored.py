"""Captures that all processes of one test run share, in the folder that `CAPTURES` names: ranks, workers, servers.

A capture takes a second, to read one a tenth of that. What a model must have in common with one that was captured is
told as text, code by what it does and objects by their classes, so that it means the same in every process. What cannot
be told so, or not be written down, is captured in each process that needs it.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import hashlib
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property, partial
from operator import attrgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hetu_fx.graph.containers import Opaque, Withheld
from hetu_fx.graph.graph import Graph, Leaf
from hetu_fx.program.contents import PLAIN, Memory, frozen
from hetu_fx.program.reads import ABSENT
from hetu_fx.program.structure import type_name
from hetu_fx.program.watched import _is_config
from tests.spawned import CAPTURES

WAIT_SECONDS, PAUSE_SECONDS = 60.0, 0.005


class UntoldError(Exception):
    """A value that means something in its own process only."""


def told(value: Any) -> str:
    """Tell a value for which one graph holds, the same in every process.

    Raises `UntoldError` for one that cannot be.
    """
    value = frozen(value)
    match value:
        case dict():
            return f"{{{', '.join(f'{told(key)}: {told(item)}' for key, item in value.items())}}}"
        case list() | tuple() | deque():
            return f"{type_name(type(value))}({', '.join(map(told, value))})"
        case set() | frozenset():
            return f"{type_name(type(value))}({', '.join(sorted(map(told, value)))})"
        case FunctionType():  # what is in its closure is read too
            return f"function {of_code(value.__code__)} {told(value.__defaults__)} {told(value.__kwdefaults__)}"
        case MethodType():
            return f"method {told(value.__func__)} of {told(value.__self__)}"
        case property():
            return f"property {told((value.fget, value.fset))}"
        case classmethod() | staticmethod():
            return f"{type(value).__name__} {told(value.__func__)}"
        case cached_property():
            return f"cached {told(value.func)}"
        case partial():
            return f"partial {told((value.func, value.args, value.keywords))}"
        case BuiltinFunctionType() if value.__self__ is None or isinstance(value.__self__, (ModuleType, type)):
            return f"built in {told(value.__self__)} {value.__qualname__}"
        case Tensor():
            return f"{value.dtype} {value.device} {value.tolist()!r}"
        case Memory():
            return f"{type_name(value.kind)} {value.layout} {digest(value.content)}"
        case type():
            return of_class(value)
        case ModuleType():
            return f"module {value.__name__}"
        case MethodDescriptorType() | OpOverload() | OpOverloadPacket() | enum.Enum():
            return repr(value)
        case _ if value is ABSENT:
            return "absent"
        case _ if isinstance(value, PLAIN):
            return f"{type(value).__name__} {value!r}"
        case _ if isinstance(value, nn.Module) or _is_config(value):  # their attributes are read too
            return f"one of {of_class(type(value))}"
    raise UntoldError(f"{type(value)} {value!r}")


@cache
def of_class(kind: type) -> str:
    """Tell a class by its name, and by the code of its functions."""
    code = {name: of_code(own.__code__) for name, own in vars(kind).items() if isinstance(own, FunctionType)}
    return f"{type_name(kind)} {digest(repr(sorted(code.items())).encode())}"


@cache
def of_code(code: CodeType) -> str:
    """Tell code by what it does, wherever it stands."""
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return digest(repr((code.co_code, names, list(map(_of_constant, code.co_consts)))).encode())


def _of_constant(value: Any) -> str:
    match value:
        case CodeType():
            return of_code(value)
        case frozenset():
            return repr(sorted(map(repr, value)))
    return repr(value)


def digest(content: bytes) -> str:
    """Return a short hash."""
    return hashlib.sha256(content).hexdigest()[:20]


@dataclass(frozen=True)
class Stored:
    """A capture: the model's own graph, and what its forward has read, as it is told."""

    source: Graph
    read: Set[str]


@dataclass(frozen=True)
class Shelf:
    """Where captures of models are that have the same in common."""

    path: Path | None

    def read(self) -> Stored | None:
        """Return the capture that is there, if one is."""
        if self.path is None or not self.path.exists():
            return None
        mode = FakeTensorMode(allow_non_fake_inputs=True, export=True, shape_env=ShapeEnv())  # as torch.export has it
        found: Any = GraphPickler.loads(self.path.read_bytes(), mode)
        graph = found["graph"].graph
        nodes = list(graph.nodes)
        leaves = tuple(Leaf(kind, name, nodes[at], *rest) for kind, name, at, *rest in found["leaves"])
        return Stored(Graph(graph=graph, leaves=leaves, **found["others"]), found["read"])

    def write(self, source: Graph, read: Set[str]) -> None:
        """Put a capture there, for others; nothing where it cannot be written down."""
        if self.path is None or not _is_known_everywhere((source.input_tree, source.output_tree, source.observed)):
            return
        at = {node: number for number, node in enumerate(source.graph.nodes)}
        leaves = [(one.kind, one.name, at[one.node], one.persistent, one.aliases) for one in source.leaves]
        others = {one.name: getattr(source, one.name) for one in fields(source) if one.name not in ("graph", "leaves")}
        copied = fx.Graph()
        copied.output(copied.graph_copy(source.graph, values := {}))
        for node, copy in values.items():
            copy.meta = dict(node.meta)
        copied.output_node().meta = dict(source.output_node.meta)
        made = {"graph": fx.GraphModule({}, copied), "leaves": leaves, "others": others, "read": read}
        try:
            data = GraphPickler.dumps(made, Options(ops_filter=None))
        except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError, AssertionError):
            return
        new = self.path.with_suffix(f".{os.getpid()}")
        new.write_bytes(data)
        new.replace(self.path)


NOTHING = Shelf(None)


@contextlib.contextmanager
def shelf(key: Sequence[Any]) -> Iterator[Shelf]:
    """Give where captures of models with this in common are; meanwhile no other process has it.

    One that captures is waited for, but not for ever.
    """
    folder = os.environ.get(CAPTURES)
    try:
        name = digest(told(tuple(key)).encode())
    except UntoldError:
        folder = None
    if folder is None:
        yield NOTHING
        return
    with (Path(folder) / f"{name}.lock").open("w") as lock:
        until = time.monotonic() + WAIT_SECONDS
        while not _is_locked(lock.fileno()) and time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)
        yield Shelf(Path(folder) / f"{name}.capture")


def _is_locked(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_known_everywhere(value: Any) -> bool:
    """Tell whether a structure is made of classes that other processes find by their names, and of plain values."""
    match value:
        case Opaque():
            return False
        case Withheld():  # texts alone
            return True
        case enum.Enum():
            return _is_known_everywhere(type(value))
        case type():
            with contextlib.suppress(AttributeError, KeyError):
                return attrgetter(value.__qualname__)(sys.modules[value.__module__]) is value
            return False
        case tuple() | list():
            return all(map(_is_known_everywhere, value))
        case _ if is_dataclass(value):
            return all(_is_known_everywhere(getattr(value, one.name)) for one in fields(value))
    return isinstance(value, PLAIN)
