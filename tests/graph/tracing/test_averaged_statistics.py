"""Batch norms that weigh all batches alike are captured, and others are as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import OutputKind
from tests.graph.compare import assert_same_as_eager


class Net(nn.Module):
    """A layer and a norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 6), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)).square().mul(torch.arange(6)).mean()


@pytest.mark.parametrize("seen", [0, 3])
def test_the_weight_of_a_batch_is_one_over_their_number(seen: int) -> None:
    torch.manual_seed(0)
    model = Net(nn.BatchNorm1d(6, momentum=None)).double()
    for _ in range(seen):
        model(torch.randn(5, 4).double())
    graph = capture(model, {"x": torch.randn(7, 4).double()})
    assert graph.batch_symbol is not None
    assert len(graph.outputs_of(OutputKind.BUFFER_UPDATE)) == 3
    assert_same_as_eager(model, graph, {"x": torch.randn(9, 4).double()}, 1e-12)


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None, track_running_stats=False), nn.BatchNorm1d(6, momentum=0.5)],
)
def test_other_norms_are_as_they_were(norm: nn.Module) -> None:
    model = Net(norm).double()
    graph = capture(model, {"x": torch.randn(7, 4).double()})
    assert_same_as_eager(model, graph, {"x": torch.randn(9, 4).double()}, 1e-12)


def test_a_norm_in_evaluation_reads_its_averages() -> None:
    model = Net(nn.BatchNorm1d(6, momentum=None)).double()
    graph = capture(model, {"x": torch.randn(7, 4).double()}, training=False)
    assert not graph.outputs_of(OutputKind.BUFFER_UPDATE)


def test_what_no_norm_takes_is_refused_as_torch_refuses_it() -> None:
    with pytest.raises(Exception, match="expected 4D input"):
        capture(Net(nn.BatchNorm2d(6, momentum=None)), {"x": torch.randn(7, 4)})
