"""Devices are as fast as a model's own blocks run on them; seconds are made up: nothing depends on time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import hetu_fx
import hetu_fx.planner.api
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import ProfileError
from hetu_fx.planner.api import FULL_TOKENS, MOST_ROWS, OwnBlocks, measure_on_blocks, most_rows
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.measure.block_times import BlockShard
from hetu_fx.planner.measure.fit import counted_seconds
from hetu_fx.program.captures import Programs
from tests import model_zoo
from tests.model_zoo import causal_batch
from tests.planner.examples import paper

LENGTH = 16
CPU = torch.device("cpu")


def blocks_of(model: nn.Module, batch: dict[str, torch.Tensor], world_size: int = 1) -> OwnBlocks:
    program = CapturedProgram.of(Programs(model, None), batch)
    return OwnBlocks.of(program, program.costs(memory=False), CPU, world_size)


def take(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let every run of a block take so many seconds."""

    def run(shard: BlockShard, inputs: Sequence[torch.Tensor], times: int) -> float:
        shard.backward(shard.forward(inputs))
        return times * seconds

    monkeypatch.setattr(hetu_fx.planner.api, "time_shard", run)


def test_a_device_whose_blocks_take_twice_as_long_as_counted_is_half_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, cluster = blocks_of(model_zoo.llama(), causal_batch(4, LENGTH)), paper(1)
    cluster = replace(cluster, devices=tuple(replace(device, op_seconds=1e-5) for device in cluster.devices))
    take(monkeypatch, 2 * counted_seconds(blocks.costs, 0, cluster, blocks.rows) / blocks.costs.num_blocks)
    assert blocks.speed_up(cluster, 0, seconds=0.0) == pytest.approx(0.5)
    found = measure_on_blocks(blocks, cluster, GroupTable(), seconds=0.0)
    assert found.device(0).flops_per_second == pytest.approx(cluster.device(0).flops_per_second / 2)
    assert counted_seconds(blocks.costs, 0, found, blocks.rows) == pytest.approx(
        2 * counted_seconds(blocks.costs, 0, cluster, blocks.rows)
    )


@pytest.mark.parametrize(("world_size", "rows"), [(1, 8), (4, 2), (16, 1)])
def test_blocks_run_with_about_the_rows_that_a_device_has(world_size: int, rows: int) -> None:
    blocks = blocks_of(model_zoo.llama(), causal_batch(8, LENGTH), world_size)
    (first, *_) = blocks.blocks
    (result,) = first[0].forward(first[1])
    assert (blocks.rows, *result.shape[:2]) == (rows, rows, LENGTH)


def test_short_sequences_are_many_enough_for_products_of_full_speed() -> None:
    assert most_rows(FULL_TOKENS // 8) == 8
    assert most_rows(FULL_TOKENS // 8 + 1) == 8
    assert most_rows(FULL_TOKENS // 8 - 1) == 9
    assert most_rows(FULL_TOKENS) == most_rows(8 * FULL_TOKENS) == most_rows(0) == MOST_ROWS


class Tower(nn.Module):
    """Blocks over rows without sequences, or none."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def test_blocks_of_rows_without_sequences_are_measured_too() -> None:
    cluster = hetu_fx.measure(Tower(2), {"x": torch.randn(4, 8)}, seconds=0.0)
    assert isinstance(cluster, Cluster)
    assert cluster.ranks == (0,)


def test_a_model_without_blocks_is_refused_with_the_way_out() -> None:
    with pytest.raises(ProfileError, match=r"no repeated blocks\nhint: profile it without measuring"):
        hetu_fx.measure(Tower(0), {"x": torch.randn(4, 8)})
