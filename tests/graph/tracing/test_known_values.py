"""What follows from constants alone may be read in a trace; all else is refused as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import CaptureError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph

aten = torch.ops.aten


class Asks(nn.Module):
    """Triples its input where a tensor that it makes says so, else halves it."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 3 if self.made(x) else x / 2).sum()


def captured(made: Callable[[Tensor], Tensor]) -> Graph:
    return capture(Asks(made), {"x": torch.randn(6, 4)})


def triples(graph: Graph) -> bool:
    targets = {node.target for node in graph.graph.nodes}
    assert (aten.mul.Tensor in targets) != (aten.div.Tensor in targets)
    return aten.mul.Tensor in targets


def causal() -> Tensor:
    return torch.triu(torch.full((5, 5), float("-inf")), 1)


def test_a_mask_of_a_fixed_length_is_compared() -> None:
    assert triples(captured(lambda x: (causal() == causal()).all()))
    assert not triples(captured(lambda x: (causal() == causal().t()).all()))


def test_what_is_written_to_a_table_is_read() -> None:
    def made(x: Tensor) -> Tensor:
        table = torch.zeros(3, 4)
        table.add_(torch.ones(4))
        return table.sum() == 12

    graph = captured(made)
    assert triples(graph)
    assert graph.batch_symbol is not None


def _random(x: Tensor) -> Tensor:
    return torch.rand(3).sum() < 9


def _unset(x: Tensor) -> Tensor:
    return torch.empty(3).isnan().any()


def _of_values(x: Tensor) -> Tensor:
    return x.sum() > 0


def _written_to(x: Tensor) -> Tensor:
    table = torch.zeros(3)
    table[0] = x.sum()
    return table.any()


def _written_to_by_a_view(x: Tensor) -> Tensor:
    table = torch.zeros(3, 4)
    table[1:].view(-1)[:4].copy_(x[0])
    return table.any()


def _written_to_by_a_part_of_open_length(x: Tensor) -> Tensor:
    table = torch.zeros(9)
    table[: x.shape[0]] = 1
    return table.any()


def _large(x: Tensor) -> Tensor:
    return torch.ones(2**12, 2**12).any()


def _filled_at_random(x: Tensor) -> Tensor:
    table = torch.zeros(3)
    table.uniform_()
    return table.any()


@pytest.mark.parametrize(
    "made",
    [
        _random,
        _unset,
        _of_values,
        _written_to,
        _written_to_by_a_view,
        _written_to_by_a_part_of_open_length,
        _large,
        _filled_at_random,
    ],
)
def test_what_differs_between_calls_is_not_known(made: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"cannot capture the model at test_known_values\.py"):
        captured(made)


def test_encoders_and_transformers_take_a_mask_that_is_made_in_forward() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Transformer(8, 2, 1, 1, 8, 0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(5)
            return self.model(x, x, src_mask=mask, tgt_mask=mask).square().mean()

    graph = capture(Model(), {"x": torch.randn(6, 5, 8)})
    assert graph.batch_symbol is not None
