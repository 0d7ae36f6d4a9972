"""Plugins of accelerate that shard models are refused by name, with where the same is asked for; none is dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

import hetu_fx
from hetu_fx.errors import StateError
from hetu_fx.integrations.accelerate import PLUGINS, SIZES, Plugin, check_plugins

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
BATCH = (torch.ones(4, 6),)
FSDP = "ACCELERATE_USE_FSDP"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def parallel() -> Net:
    return hetu_fx.auto_parallelize(Net(), BATCH, plan=hetu_fx.Plan.single(0))


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for plugin in PLUGINS:
        monkeypatch.setenv(plugin.variable, "false")  # an Accelerator that is given one sets it
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_is_refused_whichever_comes_first(version: int) -> None:
    def accelerator() -> Accelerator:
        AcceleratorState._reset_state(True)
        return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version))

    model = parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        StateError, match=r"fsdp_plugin=.*\nhint: leave it out.*activation_checkpointing: a stage's 'recompute'"
    ):
        accelerator().prepare(model, optimizer)
    with pytest.raises(StateError, match="fsdp_plugin"):
        accelerator().prepare_model(model)
    accelerator()
    with pytest.raises(StateError, match="fsdp_plugin"):
        parallel()


def test_fsdp_of_other_models_is_as_it_was() -> None:
    parallel()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    assert isinstance(accelerator.prepare(Net()), Net)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.variable)
def test_a_plugin_that_a_launch_asks_for_is_refused_with_the_place_of_each_of_its_options(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, accelerator = parallel(), Accelerator(cpu=True)
    monkeypatch.setenv(plugin.variable, "true")
    with pytest.raises(StateError) as refused:
        accelerator.prepare(model)
    assert all(f"{option}: {way}" in str(refused.value) for option, way in plugin.ways)


@pytest.mark.parametrize("name", [name for name in SIZES if name != "dp_replicate"])
def test_sizes_of_a_parallelism_config_are_refused_with_their_place(name: str) -> None:
    model, accelerator = parallel(), Accelerator(cpu=True)
    accelerator.state.parallelism_config = ParallelismConfig(**{f"{name}_size": 2})
    with pytest.raises(StateError, match=re.escape(f"{name}_size=2: {SIZES[name]}")):
        accelerator.prepare(model)


def test_replicas_alone_are_what_processes_are_anyway() -> None:
    state = Accelerator(cpu=True).state
    state.parallelism_config = ParallelismConfig(dp_replicate_size=2)
    check_plugins(state)
    state.parallelism_config = ParallelismConfig()
    check_plugins(state)


def test_the_page_says_where_each_option_is_asked_for() -> None:
    page = " ".join(PAGE.read_text().split())
    ways = [pair for plugin in PLUGINS for pair in plugin.ways]
    ways += [(f"`{name}_size`", way) for name, way in SIZES.items()]
    assert [f"| {option} | {way} |" for option, way in ways if f"| {option} | {way} |" not in page] == []
