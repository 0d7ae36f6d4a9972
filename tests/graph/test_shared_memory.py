"""Writes to what may be a view or a copy are refused where layouts in memory would tell, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import CaptureError
from hetu_fx.graph.capture import capture
from tests.graph.compare import assert_same_as_eager


class Net(nn.Module):
    """A product of what a subclass makes of a batch of (rows, 3, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(4, 4), nn.Linear(12, 2)

    def made(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.made(x)).square().mean()


class OfTheBatch(Net):
    """Writes to what lies in memory as the batch does, after it was flattened."""

    def made(self, x: Tensor) -> Tensor:
        doubled = x * 2
        flat = doubled.flatten(1)
        doubled.mul_(3)
        return flat


class IntoTheFlat(OfTheBatch):
    """Writes to the flat one and reads the other."""

    def made(self, x: Tensor) -> Tensor:
        doubled = x * 2
        flat = doubled.reshape(-1, 12)
        flat[:, 0] = 1.0
        return doubled.sum(1).repeat(1, 3) + flat


class OfOneRow(Net):
    """Flattens what lies in a row if there is one only."""

    def made(self, x: Tensor) -> Tensor:
        turned = self.wide(x).transpose(0, 1).contiguous()
        back = turned.transpose(0, 1)
        flat = back.flatten(1)
        back.mul_(3)
        return flat


class OfProducts(Net):
    """Writes to what a product has made, wherever the batch lies."""

    def made(self, x: Tensor) -> Tensor:
        product = self.wide(x)
        flat = product.flatten(1)
        product.mul_(3)
        return flat + product.sum((1, 2), keepdim=True).flatten(1)


class NotReadAgain(Net):
    """Writes to the flat one, and reads nothing else later."""

    def made(self, x: Tensor) -> Tensor:
        return (x * 2).flatten(1).mul_(3)


class ReadBefore(Net):
    """Reads the flat one before the other is written to, and the other after."""

    def made(self, x: Tensor) -> Tensor:
        doubled = x * 2
        flat = doubled.flatten(1) + 1
        doubled.mul_(3)
        return flat + doubled.sum((1, 2)).unsqueeze(1)


@pytest.mark.parametrize("model", [OfTheBatch, IntoTheFlat, OfOneRow])
def test_a_write_after_what_views_or_copies_by_strides_is_refused(model: type[Net]) -> None:
    with pytest.raises(CaptureError, match=r"gives a view of a value or a copy of it.*\n.*take a copy"):
        capture(model(), (torch.randn(5, 3, 4),))


@pytest.mark.parametrize("model", [OfProducts, NotReadAgain, ReadBefore])
def test_a_write_whose_readers_are_the_same_in_every_layout_is_followed(model: type[Net]) -> None:
    net = model().double()
    graph = capture(net, (torch.randn(5, 3, 4, dtype=torch.float64),))
    for batch in (torch.randn(7, 3, 4), torch.randn(7, 4, 3).transpose(1, 2), torch.randn(1, 3, 8)[..., ::2]):
        assert_same_as_eager(net, graph, (batch.double(),), 1e-12)
