"""Names of a graph's ops, by which programs and messages tell them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import fx

from hetu_fx.base.torch_private import OpOverload, schema
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph


def op_names(graph: Graph) -> Mapping[fx.Node, str]:
    """Return the names of all ops: `<module path>:<op>`; of further ops of a kind in a module, `...:<op>#1` and so on.

    The op is called as in torch's schema, without its overload: `mlp.up:linear`, or `:sum` outside of all modules.
    """
    seen: Counter[str] = Counter()
    names: dict[fx.Node, str] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            name = f"{_module_path(node)}:{_op(node)}"
            names[node] = f"{name}#{seen[name]}" if seen[name] else name
            seen[name] += 1
    return names


def _module_path(node: fx.Node) -> str:
    stack = meta.module_stack(node)
    return stack[-1][0] if stack else ""


def _op(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return schema(node.target).name.split("::")[-1]
    return str(getattr(node.target, "__name__", node.target))
