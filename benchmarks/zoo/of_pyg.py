"""PyG: its layers over dense adjacency matrices, and its dense poolings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import dense

from benchmarks.families.batches import CLASSES, Batch, classes
from benchmarks.families.family import Family
from benchmarks.zoo.objectives import of_library

FEATURES, WIDTH, NODES, CLUSTERS = 6, 8, 10, 4
Pool = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _gin(inputs: int, outputs: int) -> nn.Module:
    made: nn.Module = dense.DenseGINConv(nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()))
    return made


LAYERS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "DenseGCNConv": dense.DenseGCNConv,
    "DenseSAGEConv": dense.DenseSAGEConv,
    "DenseGraphConv": dense.DenseGraphConv,
    "DenseGINConv": _gin,
    "DenseGATConv": partial(dense.DenseGATConv, concat=False),
}
POOLS: Mapping[str, Pool] = {"dense_diff_pool": dense.dense_diff_pool, "dense_mincut_pool": dense.dense_mincut_pool}


class Graphs(nn.Module):
    """Two layers over graphs of equal size, whose mean scores classes; a pooling between them adds its losses."""

    def __init__(self, layer: Callable[[int, int], nn.Module], pool: Pool | None = None) -> None:
        super().__init__()
        self.first, self.second = layer(FEATURES, WIDTH), layer(WIDTH, WIDTH)
        self.pool = pool
        self.clusters = nn.Linear(WIDTH, CLUSTERS)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, adj: Tensor, labels: Tensor) -> Tensor:
        """Give the loss of the classes."""
        x, losses = self.first(x, adj).relu(), []
        if self.pool is not None:
            x, adj, *losses = self.pool(x, adj, self.clusters(x))
        scores = self.head(self.second(x, adj).mean(1))
        return sum(losses, functional.cross_entropy(scores, labels))


class Modular(nn.Module):
    """Clusters of nodes by DMoN."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dense.DenseGraphConv(FEATURES, WIDTH)
        self.pool = dense.DMoNPooling(WIDTH, CLUSTERS, dropout=0.0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, adj: Tensor, labels: Tensor) -> Tensor:
        """Give the loss of the classes and those of the clusters."""
        _, x, _, *losses = self.pool(self.first(x, adj).relu(), adj)
        return sum(losses, functional.cross_entropy(self.head(x.mean(1)), labels))


def _batch(rows: int, length: int) -> Batch:
    edges = (torch.rand(rows, NODES, NODES) < 0.4).float()
    return {
        "x": torch.randn(rows, NODES, FEATURES),
        "adj": (edges + edges.transpose(1, 2)).clamp(max=1.0),
        "labels": classes(rows),
    }


FAMILIES: list[Family] = [
    *of_library("PyG", {name: partial(Graphs, layer) for name, layer in LAYERS.items()}, None, _batch),
    *of_library(
        "PyG",
        {name: partial(Graphs, dense.DenseSAGEConv, pool) for name, pool in POOLS.items()} | {"DMoNPooling": Modular},
        None,
        _batch,
        micro_batches=1,
    ),
]
