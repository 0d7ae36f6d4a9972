"""A factor that shares a dim with the rows is cut as any other: two devices in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.annotations.local import local_part
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, GraphSlot, SlotKind
from tests.transforms.plans import deduced, device_graph, program_of, run_in_lockstep


class RowsTimesHeads(nn.Module):
    """Heads and rows in one dim, as batched matrix products want them, and weights made beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(7, 3 * 5), nn.Linear(3 * 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        slopes = torch.arange(1, 4, dtype=x.dtype)
        weights = (x.sum(-1)[:, None, :] * slopes[None, :, None]).reshape(rows * 3, length, 1)
        heads = self.project(x).view(rows, length, 3, 5).transpose(1, 2).reshape(rows * 3, length, 5)
        together = (heads * weights).reshape(rows, 3, length, 5).transpose(1, 2)
        return self.out(together.reshape(rows, length, 15))


def called(device: DeviceGraph) -> list[str]:
    return [str(node.target).rpartition(".")[0] for node in device.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("ratios", [(2, 1), (1, 2)])
def test_heads_in_one_dim_with_rows_are_cut_as_on_one_device(ratios: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, x = RowsTimesHeads().double(), torch.randn(4, 6, 7, dtype=torch.float64)
    program, plan = program_of(model, (x,)), Plan.tensor_parallel((0, 1), ratios)
    devices = {rank: device_graph(program, plan, rank, wants_values=True) for rank in (0, 1)}
    steps = "\n".join(called(devices[0]))
    assert "aten.unflatten\nhetu.local_slice\naten.flatten" in steps
    made, parameters = deduced(program, plan, wants_values=True), dict(model.named_parameters())
    lies = {p.name: made.value_annotation(p.node, made.annotated.layouts[0]) for p in made.parameters()}

    def feed(rank: int, slot: GraphSlot) -> Tensor:
        return x if slot.kind is SlotKind.INPUT else local_part(parameters[slot.name], lies[slot.name], rank)

    for found in run_in_lockstep(devices, feed).values():
        torch.testing.assert_close(*found.values(), model(x))
