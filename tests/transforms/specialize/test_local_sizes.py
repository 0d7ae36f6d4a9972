"""Parts of a length that only the run tells are computed as they are cut in numbers."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from hetu_fx.annotations.states import proportional_sizes
from hetu_fx.graph import meta
from hetu_fx.transforms.specialize.local_sizes import DimParts


@pytest.mark.parametrize("shares", [(1, 1), (2, 1), (1, 9), (5, 1, 2)])
def test_a_graph_cuts_any_length_as_numbers_are_cut(shares: tuple[int, ...]) -> None:
    graph = fx.Graph()
    length = graph.placeholder("length")
    meta.set_value(length, 11)
    parts = DimParts.in_shares(length, shares)
    example = DimParts.of_sizes(proportional_sizes(11, shares))
    assert [meta.value(size) for size in parts.sizes if isinstance(size, fx.Node)] == list(example.sizes)
    graph.output((parts.starts, parts.sizes))
    run = fx.GraphModule(torch.nn.Module(), graph)
    for number in range(20):
        known = DimParts.of_sizes(proportional_sizes(number, shares))
        assert tuple(run(number)) == (known.starts, known.sizes)
        assert (known.length, len(known.sizes)) == (number, len(shares))
