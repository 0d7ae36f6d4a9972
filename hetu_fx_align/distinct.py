"""The distinct ops of a captured model, with arguments as one forward of a batch has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph
from hetu_fx_align.call import Call
from hetu_fx_align.interpret import call_of, interpret, module_of_node


@dataclass(frozen=True, eq=False)
class DistinctOp:
    """Calls of a graph that differ in the values of their tensors alone.

    Attributes:
        call: the first of them, with its values.
        node: its name.
        module: around it; "" for the model itself.
        line: of the user's code.
        count: how many there are.
    """

    call: Call
    node: str
    module: str
    line: str
    count: int


def distinct_ops(graph: Graph, leaves: Mapping[fx.Node, Any]) -> tuple[DistinctOp, ...]:
    """Run a graph once, and return its distinct ops in the order in which they first run.

    Two calls are one op where op, sizes, strides, dtypes, and arguments that are no tensors are equal, and the same of
    the tensors carry gradients.
    """
    first: dict[str, tuple[fx.Node, Call]] = {}
    counts: dict[str, int] = {}

    def visit(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = call_of(node, args, kwargs)
        first.setdefault(call.key, (node, call.detached()))
        counts[call.key] = counts.get(call.key, 0) + 1
        return call.run()

    with torch.enable_grad():
        interpret(graph, leaves, visit)
    return tuple(
        DistinctOp(call, node.name, module_of_node(node), meta.source_line(node), counts[key])
        for key, (node, call) in first.items()
    )
