"""The length of a tensor stays open in a trace, and of all else is what it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.graph.capture import capture
from hetu_fx.graph.tracing.other_forms import open_lengths


class Compares(nn.Module):
    """Counts its rows by len, and refuses unequal inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if len(x) != len(y):
            raise ValueError("unequal")
        assert x.shape[0] == y.shape[0]
        return self.layer(x).sum() / len(x) + torch.arange(len(y)).sum() * y.mean()


def test_lengths_and_comparisons_leave_the_batch_open() -> None:
    graph = capture(Compares(), {"x": torch.randn(4, 6), "y": torch.randn(4, 6)})
    assert graph.batch_symbol is not None
    assert graph.notes == ()


def test_inputs_that_never_meet_have_one_number_of_rows() -> None:
    graph = capture(Compares(), {"x": torch.randn(4, 6), "y": torch.randn(4, 6)})
    assert len({leaf.node.meta["val"].shape[0].node.expr for leaf in graph.leaves if leaf.name in ("x", "y")}) == 1


def test_chunks_of_joined_batches_leave_the_batch_open() -> None:
    class Joins(Compares):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            first, second = self.layer(torch.cat([x, y])).chunk(2)
            return (first * second).mean()

    model, x, y = Joins(), torch.randn(4, 6), torch.randn(4, 6)
    graph = capture(model, {"x": x, "y": y})
    assert graph.batch_symbol is not None
    values = [*(p.detach() for p in model.parameters()), x, y]
    assert torch.equal(graph.module()(*values)[0], model(x, y))


def test_the_length_of_anything_else_is_what_it_was() -> None:
    with open_lengths():
        assert len([1, 2]) == 2
        assert len(torch.ones(3, 2)) == 3
        with pytest.raises(TypeError):
            len(torch.ones(()))
    assert len.__module__ == "builtins"
