"""Where operands disagree, the layout that costs least is chosen, and it computes what one device does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hetu_fx.plans.plan import Plan
from tests.model_zoo import SAMPLES, TRANSFORMER, VOCABULARY
from tests.oracles.traffic import Traffic, traffic_by_block
from tests.transforms.plans import program_of, same_as_one_device, same_in_group, talk

TWO = replace(Plan.tensor_parallel((0, 1), (2, 1)), split=(("*up*weight", 0),))


class Branches(nn.Module):
    """Adds a narrow branch, which is split, to a wide one, which is not; the sum is looked at across what was split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.other = nn.Linear(12, 48), nn.Linear(12, 48)

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(x[:, :1]) + self.other(x).cumsum(-1)).cumsum(-1).square().sum()


class ParallelBranches(nn.Module):
    """Two branches of one input, as in GPT-NeoX: each normalises it for itself, and both are added to it."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(12, 48) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(48, 12) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(12))
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.scale)
        a, b = (down(torch.relu(up(norm(x)))) for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True))
        return ((x + (a + b)) if self.first else (a + b + x)).square().sum()


class Pooled(nn.Module):
    """Reads a sum over the hidden width at its mean and at its first position only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return torch.tanh(y.mean(1)).sum() + torch.sin(y[:, 0]).sum()


class Repeated(nn.Module):
    """Repeats what is split, then looks across it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).unsqueeze(1).expand(-1, 7, -1, -1)
        return self.down(torch.relu(self.up(x))).sum() + y.cumsum(-1).square().sum()


class Scaled(nn.Module):
    """Multiplies a large activation, which is whole, by the parameters of a split width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        wide = y.repeat(1, 1, 4).cumsum(-1)
        return (wide * self.up.bias).cumsum(-1).square().sum()


def inputs(*shape: int) -> tuple[Tensor]:
    return (torch.randn(shape, dtype=torch.float64),)


def sends(model: nn.Module, batch: tuple[Tensor]) -> tuple[list[str], Counter[str]]:
    """Return what rank 0 talks, and the calls it makes; both ranks together compute what one device does."""
    devices = same_as_one_device(model.double(), batch, TWO)
    lines = talk(devices[0])
    return lines, Counter(line.split()[0] for line in lines)


def test_two_branches_are_summed_once_and_their_cotangents_once() -> None:
    for first in (True, False):
        lines, calls = sends(ParallelBranches(first), inputs(3, 5, 12))
        assert calls == {"all_reduce": 1, "identity": 1}, lines
        assert any(line.startswith("identity [0, 1]: tanh -> layer_norm") for line in lines)


def test_a_sum_that_is_read_at_a_few_places_is_made_of_these() -> None:
    lines, calls = sends(Pooled(), inputs(3, 50_000, 12))
    assert calls["all_reduce"] == 2
    assert not any("all_reduce [0, 1] duplicate: linear" in line for line in lines)


def test_a_sum_that_is_read_at_a_few_places_is_made_at_once_where_messages_cost_more() -> None:
    lines, calls = sends(Pooled(), inputs(3, 5, 12))
    assert calls["all_reduce"] == 1
    assert any("all_reduce [0, 1] duplicate: linear" in line for line in lines)


def test_of_two_branches_the_smaller_one_is_moved() -> None:
    lines, _ = sends(Branches(), inputs(3, 50, 12))
    gathers = [line for line in lines if line.startswith("all_gather")]
    assert (
        len(gathers) == 2
    )  # before the sum across what is split, which its rule keeps whole, and of the smaller branch
    assert gathers[1].endswith("linear(up, up.bias) -> add.Tensor")
    assert not any(line.startswith("local_slice") for line in lines)


def test_what_is_split_is_gathered_before_it_is_repeated() -> None:
    lines, _ = sends(Repeated(), inputs(3, 5, 12))
    gathers = [line for line in lines if line.startswith("all_gather")]
    assert len(gathers) == 1
    assert gathers[0].endswith("unsqueeze -> expand")


def test_small_parameters_come_to_a_large_activation() -> None:
    lines, _ = sends(Scaled(), inputs(3, 5, 12))
    gathers = [line for line in lines if line.startswith("all_gather")]
    assert [": up.bias" in line for line in gathers] == [True], lines
    assert not any(line.startswith("local_slice") for line in lines)


def gpt_neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TRANSFORMER, vocab_size=VOCABULARY, max_position_embeddings=64))


def gptj() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 6, "rotary_dim": 4}
    return hf.GPTJForCausalLM(hf.GPTJConfig(**sizes))


@pytest.mark.parametrize(("model", "limit"), [(gpt_neox, 1e-10), (gptj, 1e-6)])  # GPT-J casts to float32 itself
def test_a_block_of_parallel_branches_sums_once_forward_and_once_backward(
    model: Callable[[], nn.Module], limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # losses are computed in it, whose rounding hides differences
    made = model().double().train()
    batch = SAMPLES["llama"].batch(4, 11)
    program = program_of(made, batch)
    for plan in (Plan.tensor_parallel((0, 1), (2, 1)), Plan.tensor_parallel((0, 1, 2))):
        devices = same_in_group(program, made, plan, batch, limit=limit)
        found = traffic_by_block(devices[0], program.graph.block_paths)
        assert [found[block] for block in (0, 1)] == [Traffic({"all_reduce": 1}, {"all_reduce": 1})] * 2
    shared = replace(Plan.tensor_parallel((0, 1), (2, 1)), sequence_parallel=True)
    same_in_group(program, made, shared, batch, limit=limit)
