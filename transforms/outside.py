"""Values of a stage that others than its ops on tensors read."""

from __future__ import annotations

from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.graph import OutputKind
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph, stage_nodes


def read_outside(annotated: AnnotatedGraph) -> frozenset[fx.Node]:
    """Return outputs, what goes to other stages, and what is read by something else than an op on tensors."""
    graph = annotated.graph
    kinds = (OutputKind.LOSS, OutputKind.BUFFER_UPDATE, *((OutputKind.VALUE,) if annotated.wants_values else ()))
    outputs = {node for kind in kinds for _, node in graph.outputs_of(kind)}
    sent = {node for layout in annotated.layouts for node in stage_nodes(annotated, layout).sent}
    return frozenset(outputs | sent | {node for node in graph.graph.nodes if _has_other_readers(node, annotated)})


def _has_other_readers(node: fx.Node, annotated: AnnotatedGraph) -> bool:
    readers = (user for user in node.users if user.op == "call_function" and not annotated.factors.is_op(user))
    return meta.is_tensor(node) and any(not is_size(user) for user in readers)


def is_size(node: fx.Node) -> bool:
    """Tell whether the node reads one size of a tensor."""
    return str(node.target) == "aten.sym_size.int"
