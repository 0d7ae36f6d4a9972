"""Batch norm written out has torch's values, gradients and running statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind
from hetu_fx.transforms.rewrites.counts import ROWS
from hetu_fx.transforms.rewrites.global_mean import BatchStatistics, GlobalMean
from tests.graph.compare import assert_same_as_eager, run_on_one_device
from tests.model_zoo import SAMPLES, to_double

aten = torch.ops.aten


class Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x * self.scale)
        return (y * torch.arange(y.shape[-1], dtype=y.dtype)).pow(3).sum()


def rows(number: int) -> dict[str, torch.Tensor]:
    return {ROWS: torch.tensor(number)}


def has_batch_norm(graph: Graph) -> bool:
    return any("batch_norm" in str(node.target) for node in graph.graph.nodes)


NORMS = {
    "image": (lambda: nn.BatchNorm2d(6), (6, 5, 7)),
    "sequence": (lambda: nn.BatchNorm1d(6), (6, 7)),
    "vector": (lambda: nn.BatchNorm1d(6), (6,)),
    "no_affine": (lambda: nn.BatchNorm1d(6, affine=False), (6, 7)),
    "no_tracking": (lambda: nn.BatchNorm1d(6, track_running_stats=False), (6, 7)),
    "momentum": (lambda: nn.BatchNorm2d(6, momentum=0.3, eps=1e-2), (6, 5, 7)),
}


@pytest.mark.parametrize("name", NORMS)
def test_written_out_batch_norm_equals_torchs(name: str) -> None:
    make, sizes = NORMS[name]
    model = Norm(make()).double().train()
    graph = BatchStatistics()(capture(model, (torch.randn(5, *sizes, dtype=torch.float64),)))
    assert not has_batch_norm(graph)
    assert not graph.notes
    assert_same_as_eager(model, graph, (torch.randn(4, *sizes, dtype=torch.float64),), 1e-10, rows(4))


def test_values_far_from_zero_lose_no_digits() -> None:
    model = Norm(nn.BatchNorm1d(6)).train()
    x = 1000 + torch.randn(64, 6)
    graph = BatchStatistics()(capture(model, (x,)))
    updates = run_on_one_device(graph, model, (x,), rows(64))
    variance = updates[OutputKind.BUFFER_UPDATE, "norm.running_var"]
    assert torch.allclose(variance, 0.9 + 0.1 * x.double().var(0).float(), rtol=1e-5)


def test_convolutional_net_equals_eager_with_global_means_too() -> None:
    model = SAMPLES["conv"].model().double().train()
    graph = capture(model, to_double(SAMPLES["conv"].batch(5, 0)))
    graph = BatchStatistics()(GlobalMean()(graph))
    assert not has_batch_norm(graph)
    names = [leaf.name for leaf in graph.leaves_of(LeafKind.COUNT)]
    assert sorted(names) == ["count_0", ROWS]
    batch = to_double(SAMPLES["conv"].batch(4, 0))
    assert_same_as_eager(model, graph, batch, 1e-12, rows(4) | {"count_0": torch.tensor(4)})


def test_frozen_batch_norm_stays() -> None:
    model = Norm(nn.BatchNorm1d(6).eval())
    model.training = True
    graph = BatchStatistics()(capture(model, (torch.randn(5, 6),)))
    assert has_batch_norm(graph)
    assert not graph.leaves_of(LeafKind.COUNT)


def test_half_precision_takes_statistics_in_float32() -> None:
    model = Norm(nn.BatchNorm1d(6)).to(torch.bfloat16).train()
    model.norm.float()
    x = torch.randn(64, 6, dtype=torch.bfloat16)
    graph = BatchStatistics()(capture(model, (x,)))
    updates = run_on_one_device(graph, model, (x,), rows(64))
    mean = updates[OutputKind.BUFFER_UPDATE, "norm.running_mean"]
    assert mean.dtype is torch.float32
    assert torch.allclose(mean, 0.1 * x.float().mean(0), atol=1e-6)


def test_running_statistics_carry_no_gradient() -> None:
    model = Norm(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))).train()
    x = torch.randn(5, 6)
    results = run_on_one_device(BatchStatistics()(capture(model, (x,))), model, (x,), rows(5))
    updates = [value for (kind, _), value in results.items() if kind is OutputKind.BUFFER_UPDATE]
    assert len(updates) == 3
    assert not any(value.requires_grad for value in updates)
