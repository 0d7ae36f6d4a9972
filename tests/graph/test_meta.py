"""Example values of ops that passes insert keep the sizes that a batch may change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.graph.edit import insert

aten = torch.ops.aten


def test_an_op_whose_kernel_in_c_would_fix_sizes_keeps_them() -> None:
    graph = capture(nn.Conv2d(3, 4, 3), (torch.randn(5, 3, 8, 8),))
    output = graph.output_values[0]
    resized = insert(graph.output_node, aten.upsample_bilinear2d.vec, output, [7, 7], True, None)
    assert meta.depends_on_batch(resized, graph)


def test_an_op_that_holds_for_one_size_of_the_batch_alone_is_refused() -> None:
    graph = capture(nn.Linear(6, 4), (torch.randn(5, 6),))
    ones = insert(graph.output_node, aten.ones.default, [5, 4])
    with pytest.raises(CaptureError, match=r"(?s)aten.add.Tensor .* fixes sizes .* to 5.*hint: "):
        insert(graph.output_node, aten.add.Tensor, graph.output_values[0], ones)
