"""Results that are remembered are those that are worked out: forms, memory, sizes, and the graphs that come of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F

import hetu_fx.graph.capture
from hetu_fx.base.torch_private import FakeTensorMode, storage_key, without_fake_tensor_cache
from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.tracing.known_results import known_results, open_lengths


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


WIDTH = 8
OPS: dict[str, Callable[[Tensor], Any]] = {
    "a sum": lambda x: x + 1,
    "a product with numbers of another dtype": lambda x: x * torch.ones(WIDTH, dtype=torch.float64),
    "a norm of three results": lambda x: torch.native_layer_norm(x, (WIDTH,), None, None, 1e-5),
    "a view": lambda x: x.view(x.shape[0] * x.shape[1], 2, WIDTH // 2),
    "a view with an offset": lambda x: x[1:, :, ::2],
    "a view of another dtype": lambda x: x.view(torch.int32),
    "parts in a list": lambda x: x.split(3, 2),
    "parts of symbolic sizes": lambda x: x.chunk(2, 1),
    "other strides": lambda x: x.transpose(0, 2).contiguous(),
    "all strides": lambda x: x.transpose(0, 2).exp(),
    "a product of matrices": lambda x: x @ x.transpose(1, 2),
    "a value after itself": lambda x: torch.cat([x, x], 1),
    "rows that are counted": lambda x: torch.arange(x.shape[0] + x.shape[1]),
    "an expanded value": lambda x: x[:, :1].expand(-1, x.shape[1], -1),
    "a random mask": lambda x: torch.native_dropout(x, 0.5, True),
    "places of the largest": lambda x: x.max(2),
}


class Dispatched:
    """A mode, what it is given to work out, and two of its tensors that are alike."""

    def __init__(self) -> None:
        with without_fake_tensor_cache():  # torch's own, as in a trace
            self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.worked_out = list[Any]()
        own = self.mode.dispatch

        def counted(op: Any, *rest: Any) -> Any:
            self.worked_out.append(op)
            return own(op, *rest)

        self.mode.dispatch = counted  # type: ignore[method-assign]
        first = self.mode.from_tensor(
            torch.ones(6, 5, WIDTH),
            symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]),
        )
        self.like = first, first.new_empty(first.shape)


def memory(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def leaves(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def forms(result: Any, x: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield all that a trace may ask of results; of a size, which of the argument's it is."""
    given = [size.node for size in (*x.shape, *x.stride()) if isinstance(size, torch.SymInt)]

    def of(size: Any) -> Any:
        if isinstance(size, int):
            return size
        return next((place for place, node in enumerate(given) if node is size.node), size.node.expr), size.node.hint

    for one in leaves(result):
        sizes = [list(map(of, part)) for part in (one.shape, one.stride(), (one.storage_offset(),))]
        shares = memory(one) == memory(x)
        yield type(one), one.dtype, one.device, sizes, shares, one.is_contiguous(), of(one.untyped_storage().nbytes())


@pytest.mark.parametrize("name", OPS)
def test_a_second_result_is_what_it_would_be_if_nothing_was_remembered(name: str) -> None:
    made = Dispatched()
    with made.mode, torch.no_grad():
        first, second = made.like
        right = [list(forms(OPS[name](x), x)) for x in made.like]
        with known_results(made.mode):
            assert list(forms(OPS[name](first), first)) == right[0]
            before = len(made.worked_out)
            assert list(forms(OPS[name](second), second)) == right[1]
    ops = [op for op in made.worked_out[before:] if op.namespace == "aten"]
    assert not [op for op in ops if not str(op).startswith("aten.lift")], "the second was remembered"


def test_two_results_have_memory_of_their_own() -> None:
    made = Dispatched()
    with made.mode, known_results(made.mode):
        x, _ = made.like
        first, second = x + 1, x + 1
    assert memory(first) != memory(second)


def test_equal_sizes_that_are_not_one_are_told_apart() -> None:
    made = Dispatched()
    x, _ = made.like
    rows, length = x.shape[0], x.shape[1]
    with made.mode, known_results(made.mode):
        for second in (rows, rows * 1 + 0, rows):
            assert x.new_empty((rows, second, length)).shape[1].node is second.node


def test_what_follows_from_values_is_worked_out_each_time() -> None:
    made = Dispatched()
    with made.mode, known_results(made.mode):
        x, _ = made.like
        first, second = (x > 0).nonzero(), (x > 0).clone().nonzero()
    assert first.shape[0].node.expr != second.shape[0].node.expr


def test_all_is_worked_out_again_once_more_is_found_out_of_sizes() -> None:
    made = Dispatched()
    x, _ = made.like
    with made.mode, known_results(made.mode):
        x + 1
        count = len(made.worked_out)
        x + 1
        assert len(made.worked_out) == count
        assert x.shape[0] == x.shape[1] + 1
        x + 1
        assert len(made.worked_out) > count


def test_an_error_of_an_op_is_raised_each_time() -> None:
    made = Dispatched()
    with made.mode, known_results(made.mode):
        x, _ = made.like
        for _ in range(2):
            with pytest.raises(RuntimeError):
                x.view(x.shape[0], 3)
        assert (x + 1).shape == x.shape


class Block(nn.Module):
    """Views, a norm, attention and a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.three, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.view(*x.shape[:2], 2, -1).transpose(1, 2) for one in self.three(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        mixed.mul_(2.0)
        return x + self.out(F.dropout(mixed, 0.1))


class Chain(nn.Module):
    """Equal blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def told(graph: Graph) -> list[str]:
    """Return all of a graph's nodes: ops, arguments, forms of values, lines."""
    lines = []
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        each = [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Tensor)]
        of = [(one.shape, one.stride(), one.dtype, one.storage_offset()) for one in each]
        lines.append(
            f"{node.format_node()} {node.args} {node.kwargs} {of} {sorted(node.meta)} {meta.source_line(node)}"
        )
    return lines


def test_a_graph_is_the_one_that_a_trace_makes_which_remembers_nothing() -> None:
    torch.manual_seed(0)
    model, batch = Chain(), (torch.randn(6, 5, WIDTH), torch.randn(6, 5, WIDTH))
    known = capture(model, batch)
    with mock.patch.object(hetu_fx.graph.capture, "known_results", nullcontext):
        plain = capture(model, batch)
    assert told(known) == told(plain)
    assert known.conditions == plain.conditions
