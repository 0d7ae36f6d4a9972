"""Put a device graph on the device that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hetu_fx.base.device_types import HOST
from hetu_fx.base.torch_private import OpOverload
from hetu_fx.base.user_warnings import warn_user
from hetu_fx.graph import meta
from hetu_fx.graph.calls import arguments
from hetu_fx.graph.placed import place_ops
from hetu_fx.transforms.specialize.device_graph import DeviceGraph

_SPARSE = ("sparse", "sparse_grad")
"""What torch's schemas call the argument that asks for a sparse gradient."""


@dataclass(frozen=True)
class Place:
    """Let a device graph make its tensors on the device that runs it; changes the graph in place.

    Requires: a device graph, as specialised: before recomputation, which counts its ops.
    Ensures: an op that names a device, or makes a tensor of nothing, names this one. Ops that the type of device lacks,
        or that are to run on the host, read and make tensors there; those that it lacks are counted in a warning.
        Gradients are dense, but on a rank that `is_alone`: no other reads them there, and no sum over micro-batches.

        %arange = arange(%size, device='cpu')     ->     %arange = arange(%size, device='cuda:0')
    """

    device: torch.device = HOST
    is_alone: bool = False
    name: ClassVar[str] = "place"

    def __call__(self, graph: DeviceGraph) -> DeviceGraph:
        lacking = place_ops(graph.graph, self.device)
        if lacking:
            told = ", ".join(f"{count} x {name}" for name, count in sorted(lacking.items()))
            warn_user(
                f"{self.device} lacks {lacking.total()} ops of the graph of rank {graph.rank}, which run on the host, "
                f"with their tensors moved there and back: {told}",
            )
        if not self.is_alone:
            _make_gradients_dense(graph)
        return graph


def _make_gradients_dense(graph: DeviceGraph) -> None:
    """Have ops give dense gradients that were asked for sparse ones, which have the same values."""
    calls = [node for node in graph.graph.nodes if isinstance(node.target, OpOverload)]
    asked = [(node, name) for node in calls for name in _SPARSE if arguments(node).get(name) is True]
    for node, name in asked:
        place = list(arguments(node)).index(name)
        if place < len(node.args):
            node.update_arg(place, False)
        else:
            node.update_kwarg(name, False)
    if asked:
        told = ", ".join(dict.fromkeys(meta.source_line(node) for node, _ in asked))
        warn_user(
            f"gradients asked for as sparse are dense, with the same values ({told}): an optimizer that treats sparse "
            f"ones otherwise, as torch.optim.SparseAdam does, updates all rows",
        )
