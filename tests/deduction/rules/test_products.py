"""Causal attention on parts of its queries, of every kind, against the op on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from hetu_fx.check.verdict import judge
from hetu_fx.deduction.rules.forms import PartCall
from hetu_fx.deduction.rules.registry import RULES
from hetu_fx.graph import meta
from hetu_fx.graph.calls import arguments
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Plan

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
PARTS = [(4, 4), (0, 7, 1), (5, 0, 3), (8, 0), (3, 1, 4)]


def operands(heads: int, keys: int) -> list[Tensor]:
    torch.manual_seed(0)
    made = (torch.randn(2, count, length, 8) for count, length in ((6, 8), (heads, keys), (heads, keys)))
    return [x.double().requires_grad_() for x in made]


def part_of(given: list[Tensor], sizes: tuple[int, ...], position: int, grouped: bool) -> fx.GraphModule:
    """Write the form for one part of the queries."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("query", "key", "value")]
    for node, value in zip(nodes, given, strict=True):
        meta.set_value(node, value)
    logical = graph.call_function(ATTENTION, tuple(nodes), {"is_causal": True, "enable_gqa": grouped})

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(target, args, kwargs)

    form = RULES[str(ATTENTION)].traits.placed
    assert form is not None
    devices, start = tuple(range(len(sizes))), sum(sizes[:position])
    part = PartCall(logical, arguments(logical), devices, position, sizes, start, {}, emit, emit, emit)
    graph.output(form(part))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("sizes", PARTS)
@pytest.mark.parametrize(("heads", "keys"), [(6, 8), (3, 8), (6, 5)])
def test_causal_attention_of_parts_is_that_of_all_queries(sizes: tuple[int, ...], heads: int, keys: int) -> None:
    given = operands(heads, keys)
    expected = ATTENTION(*given, is_causal=True, enable_gqa=heads < 6)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    query, key, value = given
    found = torch.cat(
        [
            part_of(given, sizes, i, heads < 6)(query.narrow(2, start, size), key, value)
            for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ],
        2,
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(expected)
    wanted, got = (torch.autograd.grad(result, given, cotangent) for result in (expected, found))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_keys_after_the_last_query_of_the_part_are_not_read() -> None:
    given = operands(6, 8)
    middle = part_of(given, (3, 2, 3), 1, False)
    with_other_keys = [x.detach().clone() for x in given]
    for x in with_other_keys[1:]:
        x[:, :, 5:] = float("nan")
    query = given[0].narrow(2, 3, 2)
    torch.testing.assert_close(middle(query, *given[1:]), middle(query, *with_other_keys[1:]))


class EveryOtherChannel(nn.Module):
    """Convolves, in two groups, every other channel of as many as the batch has; rows are the last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(2, 4, 3, padding=1, groups=2), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.movedim(2, 0)[:, ::2]).flatten(1)).square().mean()


@pytest.mark.parametrize("plan", [Plan.data_parallel((0, 1), (2, 1)), Plan.tensor_parallel((0, 1))])
def test_groups_of_channels_that_only_the_run_counts_are_whole(plan: Plan) -> None:
    torch.manual_seed(0)
    model, batches = EveryOtherChannel().double(), [{"x": torch.randn(3, 3, 9).double()}]
    how = Lockstep(row_dims={"x": 2})
    verdict = judge("", train_alone(model, batches, how), how.train(model, batches, plan), 1e-12, "")
    assert verdict.verdict == "equal", verdict
