"""Products beside communication on real processes: by messages, by reading memory, and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spawned import results_of

RANKS, SIZES = [0, 1, 2], [40, 0, 24]
WIDTH, WIDE = 64, 96


def work(rank: int, store: str, results: Any) -> None:
    from unittest.mock import patch

    import torch
    import torch.distributed as dist

    from hetu_fx.comm_ops.wire import algorithms
    from hetu_fx.comm_ops.wire.groups import GroupTable, using
    from hetu_fx.transforms.lowering.lower import lower
    from tests.comm_ops.ops.test_overlapped_ranks import gradients_of, made, traced

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(RANKS))
    found = {}
    with using(GroupTable()):
        for sizes, slices in (([], "2 from 16"), ([], ""), (SIZES, "2 from 16")):
            module = traced(sizes, slices)
            for backend in (None, "aot_eager"):
                key = f"read {slices}", bool(sizes), backend
                found[key] = gradients_of(lower(module, backend), *made(rank, sizes))
            with patch.object(algorithms, "peers_worth_reading", return_value=None):
                found["sent", bool(sizes), None] = gradients_of(module, *made(rank, sizes))
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def traced(sizes: list[int], slices: str) -> Any:
    """Make a feed-forward block's part of one rank."""
    import torch
    from torch import fx, nn

    import hetu_fx.comm_ops.ops.table  # noqa: F401 - registers the ops

    graph = fx.Graph()
    x, gate, up, down = (graph.placeholder(name) for name in ("x", "gate", "up", "down"))
    layout = "aten.linear.default", RANKS, 1, sizes, "", slices
    pair = graph.call_function(torch.ops.hetu.gathered_products.default, (x, [gate, up], [], *layout))
    first, second = (graph.call_function(lambda made, at: made[at], (pair, at)) for at in (0, 1))
    inner = graph.call_function(torch.ops.aten.mul.Tensor, (first, second))
    given = inner, down, None, layout[0], "duplicate", *layout[1:]
    graph.output((graph.call_function(torch.ops.hetu.summed_product.default, given),))
    return fx.GraphModule(nn.Module(), graph)


def whole() -> Any:
    import torch

    torch.manual_seed(1)
    shapes = (2, sum(SIZES), WIDTH), (WIDE, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE)
    return [torch.randn(shape, dtype=torch.float64) / 8 for shape in shapes]


def made(rank: int, sizes: list[int]) -> Any:
    """Give a rank its part of the rows and weights, and that of what the result is multiplied with for the loss."""
    x, gate, up, down = whole()
    count = WIDE // len(RANKS)
    part = slice(rank * count, (rank + 1) * count)
    rows = x.split(SIZES, 1)[rank] if sizes else x
    ends = gate[part], up[part], down[:, part]
    return rows, *(end.contiguous() for end in ends)


def gradients_of(function: Any, *given: Any) -> Any:
    leaves = [one.clone().requires_grad_() for one in given]
    (made,) = function(*leaves)
    made.sin().sum().backward()
    return [leaf.grad.numpy() for leaf in leaves]


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_gradients_are_those_of_one_device(tmp_path: Path) -> None:
    import torch

    found = results_of(work, len(RANKS), str(tmp_path / "store"), seconds=200)
    linear = torch.nn.functional.linear
    alone = gradients_of(lambda x, gate, up, down: (linear(linear(x, gate) * linear(x, up), down),), *whole())
    of_x, *of_ends = (torch.from_numpy(one) for one in alone)
    for rank in RANKS:
        assert len(found[rank]) == 8
        for (_, cuts, _), (rows, *ends) in found[rank].items():
            torch.testing.assert_close(torch.from_numpy(rows), of_x.split(SIZES, 1)[rank] if cuts else of_x)
            for dim, own, end in zip((0, 0, 1), ends, of_ends, strict=True):
                torch.testing.assert_close(torch.from_numpy(own), end.chunk(len(RANKS), dim)[rank])
