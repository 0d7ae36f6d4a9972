"""The part of a program that computes the local counts of some rows from inputs alone, before the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hetu_fx.graph.graph import Graph, LeafKind, OutputKind


@dataclass(frozen=True, eq=False)
class Prologue:
    """Computes the local counts of some rows.

    Fields:
        inputs: names of the inputs it reads.
        constants: values of the constants it reads.
        compute: takes inputs, then constants, and returns the counts.
    """

    inputs: tuple[str, ...]
    constants: tuple[Tensor, ...]
    compute: Callable[..., tuple[Tensor, ...]]

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[float, ...]:
        """Return the counts of the rows in `inputs`, in the order of the graph's COUNT leaves."""
        with torch.no_grad():
            counts = self.compute(*(inputs[name] for name in self.inputs), *self.constants)
        return tuple(float(count) for count in counts)


def extract_prologue(graph: Graph) -> Prologue:
    """Return the part of a graph that computes its local counts from inputs and constants."""
    part = graph.select(lambda leaf: leaf.kind is OutputKind.COUNT)
    for leaf in part.leaves:
        if not leaf.node.users:
            part.graph.erase_node(leaf.node)
    used = [leaf for leaf in part.leaves if leaf.node.users]
    inputs = tuple(leaf.name for leaf in used if leaf.kind is LeafKind.INPUT)
    constants = tuple(graph.constants[leaf.name] for leaf in used if leaf.kind is LeafKind.CONSTANT)
    kinds = [leaf.kind for leaf in used]
    assert set(kinds) <= {LeafKind.INPUT, LeafKind.CONSTANT}, "counts are computed from inputs and constants"
    order = sorted(range(len(used)), key=lambda index: kinds[index] is LeafKind.CONSTANT)
    module = fx.GraphModule(torch.nn.Module(), part.graph)

    def compute(*values: Tensor) -> tuple[Tensor, ...]:
        placed = dict(zip(order, values, strict=True))
        return tuple(module(*(placed[index] for index in range(len(used)))))

    return Prologue(inputs, constants, compute)
