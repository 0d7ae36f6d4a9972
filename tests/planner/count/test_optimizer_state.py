"""What optimizers keep, held against the bytes that real ones hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.kit.memory import Recorded, measured_step, recording
from hetu_fx.errors import ProfileError
from hetu_fx.planner.count.optimizer_state import optimizer_state_of
from hetu_fx.planner.values.device_memory import UPDATE_LISTS
from hetu_fx.planner.values.state import OPTIMIZERS, SIZES, ParameterState

SIDE = 256
Make = Callable[..., torch.optim.Optimizer]
NAMES: dict[str, tuple[Make, dict[str, Any]]] = {
    name.lower(): (getattr(torch.optim, name), {})
    for name in ("Adafactor", "Adagrad", "Adadelta", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam")
} | {
    "rmsprop": (torch.optim.RMSprop, {}),
    "rprop": (torch.optim.Rprop, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def parameter(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.ones(SIDE, SIDE, dtype=dtype))


def held_bytes(optimizer: torch.optim.Optimizer, own: nn.Parameter) -> int:
    """Return the bytes of parameter, gradient and state of an optimizer that has made a step."""
    own.grad = torch.ones_like(own)
    optimizer.step()
    kept = [value for value in optimizer.state.get(own, {}).values() if isinstance(value, Tensor)]
    return sum(one.numel() * one.element_size() for one in (own, own.grad, *kept))


def test_the_table_names_all_optimizers_that_are_tried() -> None:
    assert set(NAMES) == set(OPTIMIZERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_and_the_optimizer_itself_say_what_it_holds(name: str, dtype: torch.dtype) -> None:
    make, settings = NAMES[name]
    own = parameter(dtype)
    fresh = make([own], **settings)
    measured, named = optimizer_state_of([own], fresh), optimizer_state_of([own], name)
    assert measured.optimizer == name
    held = held_bytes(fresh, own) / own.numel()
    assert measured.whole_share * own.element_size() == pytest.approx(held, rel=0.02), "a step's count, rows, columns"
    assert optimizer_state_of([own], fresh) == measured, "after a step as before it"
    assert named.whole_share == measured.whole_share


@pytest.mark.parametrize(("settings", "count"), [({}, 2), ({"amsgrad": True}, 3)])
def test_the_settings_of_an_optimizer_count(settings: dict[str, Any], count: int) -> None:
    own = parameter(torch.float32)
    assert optimizer_state_of([own], torch.optim.AdamW([own], **settings)).slots == ("fp32",) * count


@pytest.mark.parametrize(
    ("settings", "by_lists"),
    [({}, False), ({"foreach": True}, True), ({"foreach": False}, False), ({"fused": True}, False)],
)
def test_lists_are_held_at_once_where_the_optimizer_is_told_to(settings: dict[str, Any], by_lists: bool) -> None:
    own = parameter(torch.float32)
    assert optimizer_state_of([own], torch.optim.AdamW([own], **settings)).by_lists == by_lists


def test_the_step_of_an_optimizer_by_lists_holds_as_much_more_as_the_model_counts() -> None:
    owned = [nn.Parameter(torch.zeros(1 << 12)) for _ in range(16)]
    for one in owned:
        one.grad = torch.ones_like(one)
    optimizer = torch.optim.AdamW(owned, foreach=True)
    optimizer.step()
    with recording() as record, measured_step():
        optimizer.step()
    assert Recorded.of(record).peak_bytes == pytest.approx(
        UPDATE_LISTS * 4 * sum(one.numel() for one in owned), rel=0.05
    )


class Mastered(torch.optim.Optimizer):
    """Adam for parameters of few bits: a copy in fp32, and moments of its type."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for own in group["params"]:
                for name in ("master", "first", "second"):
                    self.state[own].setdefault(name, own.detach().float().clone())


def test_an_optimizer_with_a_master_copy_holds_16_bytes_for_bf16() -> None:
    own = parameter(torch.bfloat16)
    found = optimizer_state_of([own], Mastered([own]))
    assert found.whole_share * SIZES["bf16"] == 16 == ParameterState("bf16", master="fp32").whole_share * 2
    assert held_bytes(Mastered([own]), own) == 16 * own.numel()


def test_parameters_alone_are_planned_with_adamw_of_their_type() -> None:
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.LayerNorm(64))
    assert optimizer_state_of(model.parameters()) == ParameterState("bf16")


def test_an_optimizer_that_cannot_be_tried_is_refused_with_the_way_out() -> None:
    own = parameter(torch.float32)
    with pytest.raises(ProfileError, match=r"cannot find out what LBFGS keeps .*\nhint: .* optimizer='adamw'"):
        optimizer_state_of([own], torch.optim.LBFGS([own]))
