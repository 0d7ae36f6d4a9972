"""Put a device graph on the device that runs it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch

from hetu_fx.base.device_types import HOST
from hetu_fx.graph.placed import place_ops
from hetu_fx.transforms.specialize.device_graph import DeviceGraph


@dataclass(frozen=True)
class Place:
    """Let a device graph make its tensors on the device that runs it; changes the graph in place.

    Requires: a device graph, as specialised: before recomputation, which counts its ops.
    Ensures: an op that names a device, or makes a tensor of nothing, names this one. Ops that the type of device lacks,
        or that are to run on the host, read and make tensors there; those that it lacks are counted in a warning.

        %arange = arange(%size, device='cpu')     ->     %arange = arange(%size, device='cuda:0')
    """

    device: torch.device = HOST
    name: ClassVar[str] = "place"

    def __call__(self, graph: DeviceGraph) -> DeviceGraph:
        lacking = place_ops(graph.graph, self.device)
        if lacking:
            told = ", ".join(f"{count} x {name}" for name, count in sorted(lacking.items()))
            warnings.warn(
                f"{self.device} lacks {lacking.total()} ops of the graph of rank {graph.rank}, which run on the host, "
                f"with their tensors moved there and back: {told}",
                stacklevel=2,
            )
        return graph
