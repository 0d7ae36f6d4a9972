"""What the graph's symbols stand for in a batch, and which batches the graph cannot take."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor, nn

from hetu_fx.errors import BatchError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.program.program import Shapes, bind, evaluate, input_shapes


class Pooled(nn.Module):
    """Two inputs of one length, so that one symbol stands in both; a fixed width."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.layer(x) * mask.unsqueeze(-1)).sum(1)


def batch(rows: int, length: int, width: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, width), "mask": torch.ones(rows, length)}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Pooled(), batch(4, 7), training=True)


@pytest.fixture(scope="module")
def shapes(graph: Graph) -> Shapes:
    return input_shapes(graph.leaves_of(LeafKind.INPUT))


def test_symbols_stand_for_the_sizes_of_this_batch(graph: Graph, shapes: Shapes) -> None:
    bindings = bind(shapes, batch(3, 11))
    assert bindings[graph.batch_symbol] == 3
    assert sorted(bindings.values()) == [3, 11]


def test_two_inputs_that_must_agree_are_refused_when_they_do_not(shapes: Shapes) -> None:
    wrong = {"x": torch.randn(4, 7, 6), "mask": torch.ones(4, 8)}
    with pytest.raises(BatchError, match=r"dim 1 of input '\w+' has size [78], but the captured graph needs [78]"):
        bind(shapes, wrong)


def test_a_fixed_size_is_named_with_what_to_do(shapes: Shapes) -> None:
    with pytest.raises(
        BatchError, match=r"dim 2 of input 'x' has size 9, but the captured graph needs 6 there\nhint: pad the batch"
    ):
        bind(shapes, batch(4, 7, width=9))


def test_another_number_of_dims_is_refused(shapes: Shapes) -> None:
    with pytest.raises(BatchError, match=r"input 'x' has 2 dims \(4, 6\), but the model was captured with 3"):
        bind(shapes, {"x": torch.randn(4, 6), "mask": torch.ones(4, 7)})


def test_a_shape_is_evaluated_by_its_symbols() -> None:
    rows, length = sympy.symbols("rows length", integer=True)
    assert evaluate((rows, length * 2 - 1, 5), {rows: 3, length: 4}) == (3, 7, 5)
