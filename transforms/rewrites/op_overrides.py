"""Ops that are run in another way than they stand in the model: in a wider dtype, or on the host.

`hetu-fx-align` writes the file where a kind of device is not exact enough, `Options(align=...)` obeys it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from hetu_fx.base.documents import json_kind, nearest
from hetu_fx.base.json_values import Values, is_object
from hetu_fx.base.records import Document, Key, record
from hetu_fx.base.torch_private import OpOverload, op_names, tree_map
from hetu_fx.errors import AlignError
from hetu_fx.graph import meta
from hetu_fx.graph.edit import Rewrite, insert
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.meta import HALVES

aten = torch.ops.aten
UP_CAST, ON_HOST = "up-cast", "on host"
WIDER: Mapping[torch.dtype, torch.dtype] = {**dict.fromkeys(HALVES, torch.float32), torch.float32: torch.float64}
"""What is computed in where a dtype is not exact enough; float64 stays."""


def find_op(name: str, where: str) -> OpOverload[..., Any]:
    """Return an op of torch by its name, such as aten.linear.default.

    Raises:
        AlignError: there is none; says where the name stands, and the nearest one.
    """
    parts = name.split(".") if isinstance(name, str) else []
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    if len(parts) != 3 or not isinstance(found, OpOverload):
        close = nearest(str(name), op_names()) if isinstance(name, str) else ""
        close = close if "did you mean" in close else ""
        raise AlignError(f"{where}: {name!r} is no op of torch{close}\nhint: write it like aten.linear.default")
    return found


def _ops(values: Any, where: str) -> dict[str, str]:
    """Read overrides by name of op."""
    for name, way in values.items():
        find_op(name, where)
        if not isinstance(way, str) or way not in MANNERS:
            told = nearest(way, tuple(MANNERS)) if isinstance(way, str) else ""
            raise AlignError(
                f"{where}: {name!r} must be one of {', '.join(map(repr, MANNERS))}, not {json_kind(way)}{told}"
            )
    return dict(values)


@dataclass(frozen=True)
class OpOverrides(Document):
    """How ops are run, by name: `up-cast` or `on host`. Ops that are not named run as they stand.

    Attributes:
        ops: what is done, by the op's name, such as aten.softmax.int.
    """

    ops: Mapping[str, str] = field(default_factory=dict)


OpOverrides.form = record(
    OpOverrides,
    AlignError,
    format="hetu_fx.align/1",
    ops=Key(Values("an object of ops", is_object, _ops, dict), written="always"),
)


@dataclass(frozen=True)
class Override:
    """Run some ops in a wider dtype, and bring their results back, or on the host.

    Requires: a captured graph; after all that writes ops anew, so that those it runs are found.
    Ensures: an op that is up-cast reads tensors of real numbers in the next wider dtype, as it is told to make them,
        and its results have the dtypes of before. One that is to run on the host is marked so, and stays as it is until
        the graph is put on a device. Ops that are not named stay as they are.

        %y = softmax(%x, -1)     ->     %wide = to(%x, float32); %made = softmax(%wide, -1); %y = to(%made, bfloat16)
    """

    name: ClassVar[str] = "override"
    overrides: OpOverrides = field(default_factory=OpOverrides)

    def __call__(self, graph: Graph) -> Graph:
        return _OverrideRewrite(graph, self.overrides).run() if self.overrides.ops else graph


class _OverrideRewrite(Rewrite):
    """Rewrites ops that are named."""

    def __init__(self, graph: Graph, overrides: OpOverrides) -> None:
        super().__init__(graph)
        self.overrides = overrides

    def run(self) -> Graph:
        """Return the graph rewritten; ops that are named and not there are noted."""
        there = sorted({str(node.target) for node in self.graph.graph.nodes if node.op == "call_function"})
        for name in self.overrides.ops:
            if name not in there:
                self.notes.append(f"{name} is to run {self.overrides.ops[name]!r}, and is no op of this graph")
        return super().run()

    def visit(self, node: fx.Node) -> None:
        """Rewrite an op if it is named."""
        way = self.overrides.ops.get(str(node.target))
        if way is None or not meta.has_tensor(node):
            return
        results = _results(node)
        if MANNERS[way](node):
            _bring_back(node, results)


Result = tuple[fx.Node, torch.dtype]


def _results(node: fx.Node) -> list[Result]:
    """Return the nodes of an op's tensors (itself, or the parts of its tuple) with their dtypes."""
    nodes = [node] if meta.is_tensor(node) else [user for user in node.users if meta.is_tensor(user)]
    return [(one, meta.dtype(one)) for one in nodes]


def _bring_back(node: fx.Node, results: list[Result]) -> None:
    """Let users of the results have them in the dtypes of before."""
    meta.infer(node)
    for result, dtype in results:
        if result is not node:
            meta.infer(result)
        if meta.dtype(result) != dtype:
            _insert_back(result, dtype)


def _insert_back(result: fx.Node, dtype: torch.dtype) -> None:
    users = list(result.users)
    with result.graph.inserting_after(result):
        back = result.graph.call_function(aten.to.dtype, (result, dtype))
    meta.copy_meta(result, back)
    meta.infer(back)
    for user in users:
        user.replace_input_with(result, back)


def _up_cast(node: fx.Node) -> bool:
    """Let an op read and make wider numbers; tell whether there were any to widen.

    It computes in what is wider than the least exact of its tensors; those that are that wide already stay.
    """
    given = {meta.dtype(one) for one in node.all_input_nodes if meta.is_tensor(one)} & WIDER.keys()
    if not given:
        return False
    narrow = max(given, key=lambda dtype: torch.finfo(dtype).eps)
    wide = WIDER[narrow]

    def widened(argument: Any) -> Any:
        if isinstance(argument, torch.dtype):
            return wide if WIDER.get(argument) == wide else argument
        is_narrow = (
            isinstance(argument, fx.Node) and meta.is_tensor(argument) and WIDER.get(meta.dtype(argument)) == wide
        )
        return insert(node, aten.to.dtype, argument, wide) if is_narrow else argument

    node.args, node.kwargs = tree_map(widened, node.args), tree_map(widened, dict(node.kwargs))
    return True


def _on_host(node: fx.Node) -> bool:
    """Let whatever device runs the graph run an op on the host (`specialize.place`); here nothing changes."""
    meta.run_on_host(node)
    return False


MANNERS: Mapping[str, Callable[[fx.Node], bool]] = {UP_CAST: _up_cast, ON_HOST: _on_host}
"""What can be done with an op, by name: changes how it is called, and tells whether there was anything to change."""
