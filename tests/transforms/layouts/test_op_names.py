"""Names of ops: by module, in order of calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hetu_fx.graph.capture import capture
from hetu_fx.transforms.layouts.op_names import op_names


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(self.up(x)) * 2 * 3).sum()


def test_ops_are_named_by_module_and_numbered_where_they_come_again() -> None:
    graph = capture(Twice(), {"x": torch.randn(3, 4)}, loss_fn=lambda out, **batch: out)
    names = list(op_names(graph).values())
    assert len(set(names)) == len(names)
    assert {"up:linear", "up:linear#1", ":mul", ":mul#1", ":sum"} <= set(names)
