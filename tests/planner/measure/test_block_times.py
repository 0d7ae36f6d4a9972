"""Blocks run alone, as any device of a group would run its part; seconds are made up: nothing depends on time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx.planner.api
import hetu_fx.planner.measure.block_times
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import ClusterError, ProfileError
from hetu_fx.planner.api import profile
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.measure.block_times import BlockShard, Measuring, make_block_shard, merge_profiles
from hetu_fx.planner.measure.fit import distinct_blocks, timed_degrees
from hetu_fx.planner.values.profile_file import BlockTime, Profile, Slowdown
from hetu_fx.program.captures import Programs
from hetu_fx.program.program import Program
from hetu_fx.transforms.specialize.device_graph import SlotKind
from tests import model_zoo
from tests.model_zoo import causal_batch
from tests.planner.examples import paper, transformer
from tests.spawned import results_of

LENGTH = 16
DEGREES = [1, 2]
CPU = torch.device("cpu")


def llama() -> nn.Module:
    """Return a model that two devices can cut evenly."""
    return model_zoo.llama(num_key_value_heads=2)


def run_by_size(shard: BlockShard, inputs: Sequence[torch.Tensor]) -> float:
    """Run a shard, and say that it takes as long as it has to do."""
    shard.backward(shard.forward(inputs))
    tokens = next(t.shape[1] for s, t in zip(shard.device.slots, inputs, strict=True) if s.kind is SlotKind.RECEIVED)
    weights = sum(t.numel() for s, t in zip(shard.device.slots, inputs, strict=True) if s.kind is SlotKind.PARAMETER)
    return tokens * weights * 1e-6


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hetu_fx.planner.measure.block_times, "time_shard", run_by_size)
    monkeypatch.setattr(hetu_fx.planner.measure.block_times, "_CELL_SECONDS", 0.0)


@pytest.fixture(scope="module")
def program() -> Program:
    return Programs(llama(), None).first(causal_batch(4, LENGTH), training=True)


@pytest.mark.parametrize("length", [5, LENGTH])
def test_a_shard_has_its_part_of_the_parameters_and_gets_their_gradients(program: Program, length: int) -> None:
    for degree in (1, 2):
        shard = make_block_shard(program, 0, degree)
        inputs = shard.inputs(length, CPU)
        results = shard.forward(inputs)
        assert [tuple(result.shape[:2]) for result in results] == [(1, length)]
        shard.backward(results)
        pairs = list(zip(shard.device.slots, inputs, strict=True))
        assert all(t.grad is not None for slot, t in pairs if slot.kind is SlotKind.PARAMETER)
        (query,) = (t for slot, t in pairs if slot.name.endswith("layers.0.self_attn.q_proj.weight"))
        assert query.shape[0] * degree == query.shape[1]


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_blocks_with_dropout_two_lengths_or_experts_run_alone(name: str) -> None:
    sample = model_zoo.SAMPLES[name]
    captured = CapturedProgram.of(Programs(sample.model(), None), sample.batch(4, LENGTH))
    costs = captured.costs(4)
    for block, _ in distinct_blocks(costs):
        for degree in timed_degrees(costs.units):
            shard = make_block_shard(captured.program, block, degree)
            inputs = shard.inputs(LENGTH // 2, CPU)
            shard.backward(shard.forward(inputs))
            trained = [t for t in inputs if t.requires_grad]
            assert any(t.grad is not None and t.grad.shape == t.shape for t in trained)


def test_a_shard_keeps_less_than_the_whole_block_and_in_proportion_to_the_length(program: Program) -> None:
    whole, half = make_block_shard(program, 1, 1), make_block_shard(program, 1, 2)
    kept = [shard.kept_bytes(shard.inputs(LENGTH, CPU)) for shard in (whole, half)]
    assert kept[0] / 2 < kept[1] < kept[0]
    assert whole.kept_bytes(whole.inputs(LENGTH // 2, CPU)) == pytest.approx(kept[0] / 2, rel=0.1)


@pytest.mark.usefixtures("no_clock")
def test_a_measured_profile_has_times_and_alpha_and_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(hetu_fx.planner.api, "telling", lambda *_, **__: nullcontext(lambda *now: told.append(now)))
    made = profile(llama(), causal_batch(4, LENGTH), measured=Measuring(paper(10, 10), 60.0))
    assert made.costs == profile(llama(), causal_batch(4, LENGTH)).costs
    assert [(time.kind, time.tensor_parallel) for time in made.times] == [("paper", degree) for degree in DEGREES]
    assert all(time.r_squared is not None and time.r_squared > 0.99 for time in made.times)
    assert made.times[0].bytes_per_token > made.times[1].bytes_per_token > 0
    assert made.alpha[0].factors[1] > made.alpha[0].factors[2] == 1.0
    assert told[0] == ("block 1 on 1 x 4 tokens", 0, 8)
    assert [done for _, done, _ in told] == list(range(8))
    made.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == made


def test_the_fastest_device_of_each_kind_measures() -> None:
    cluster = Cluster.on_paper([1, 2, 5, 5], kinds=["a", "a", "b", "b"])
    measuring = Measuring(cluster)
    assert [measuring.measures(rank) for rank in range(4)] == [False, True, True, False]
    with pytest.raises(ClusterError, match="no device of rank 4"):
        measuring.measures(4)


class Tower(nn.Module):
    """Blocks over rows without sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def test_a_model_without_sequences_or_values_is_refused_with_the_way_out() -> None:
    with pytest.raises(ProfileError, match="no sequences that could have other lengths\nhint: profile it without"):
        profile(Tower(), {"x": torch.randn(4, 8)}, measured=Measuring(paper(1)))
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ProfileError, match=r"on the meta device.*to_empty"):
        profile(model, causal_batch(4, LENGTH), measured=Measuring(paper(1)))


def test_profiles_of_several_kinds_are_joined() -> None:
    parts = [
        Profile(transformer(), LENGTH, times=(BlockTime(kind, 1, 0.0, 1.0),), alpha=(Slowdown(kind, {1: 1.0}),))
        for kind in "ab"
    ]
    whole = merge_profiles(parts)
    assert [time.kind for time in whole.times] == ["a", "b"]
    assert [alpha.kind for alpha in whole.alpha] == ["a", "b"]


def measure_as(rank: int, store: str, results: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    hetu_fx.planner.measure.block_times.time_shard = run_by_size
    hetu_fx.planner.measure.block_times._CELL_SECONDS = 0.0
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    made = profile(llama(), causal_batch(4, LENGTH), measured=Measuring(paper(1, 10)))
    results.put((rank, made.to_json()))
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_what_one_process_measures_all_are_told(tmp_path: Path) -> None:
    found = results_of(measure_as, 2, str(tmp_path / "store"), seconds=220)
    assert found[0] == found[1]
    assert [time["tensor_parallel"] for time in found[0]["times"]] == DEGREES
