"""What an element of a parameter costs: bytes by type and optimizer, in words, and in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetu_fx.errors import ProfileError
from hetu_fx.planner.price.placement import device_bytes
from hetu_fx.planner.values.device_memory import fixed_bytes
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.state import UNSAID, ParameterState
from hetu_fx.plans.plan import Plan
from tests.planner.examples import transformer

BF16 = ParameterState("bf16", master="fp32")


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (BF16, "16 bytes a parameter: bf16 weights and gradients, fp32 master and two moments (adamw)"),
        (ParameterState("bf16"), "8 bytes a parameter: bf16 weights, gradients and two moments (adamw)"),
        (ParameterState("fp32"), "16 bytes a parameter: fp32 weights, gradients and two moments (adamw)"),
        (ParameterState("bf16", "fp32", "fp32"), "18 bytes a parameter: bf16 weights, fp32 gradients, master and two"),
        (
            ParameterState("fp32", by_lists=True),
            "16 bytes a parameter: fp32 weights, gradients and two moments (adamw, by",
        ),
        (ParameterState("fp32", optimizer="sgd"), "8 bytes a parameter: fp32 weights and gradients (sgd)"),
        (ParameterState("fp32", optimizer="rmsprop"), "12 bytes a parameter: fp32 weights, gradients and one state"),
        (
            ParameterState("bf16", optimizer="adam8bit", slots=("int8", "int8")),
            "6 bytes a parameter: bf16 weights and gradients, int8 two moments (adam8bit)",
        ),
        (UNSAID, "4 times the bytes of the parameters: weights, gradients and two moments (adamw); no dtype is known"),
    ],
)
def test_bytes_follow_from_types_and_optimizer_and_are_said(state: ParameterState, text: str) -> None:
    assert str(state).startswith(text)


def test_what_is_not_said_is_four_times_the_parameters() -> None:
    assert (UNSAID.optimizer_share, UNSAID.gradient_share, UNSAID.whole_share) == (2.0, 1.0, 4.0)


@pytest.mark.parametrize(("zero", "replicas"), [(0, 1), (0, 4), (1, 4)])
def test_states_of_a_device_have_the_bytes_of_their_types(zero: int, replicas: int) -> None:
    terms = dict(fixed_bytes(200.0, zero=zero, num_replicas=replicas, state=BF16))  # of 100 elements
    spread = (200 + 1200) / 4
    assert terms == {"parameters": 200, "gradients": 200, "optimizer": spread if zero else 1200}


def test_the_memory_model_counts_them_on_every_device() -> None:
    plain, more = transformer(), replace(transformer(), state=BF16)
    plan = Plan.data_parallel([0, 1])
    for rank, terms in device_bytes(plan, plain, {0: 1.0, 1: 1.0}).items():
        told = dict(device_bytes(plan, more, {0: 1.0, 1: 1.0})[rank])
        assert told["optimizer"] == 3 * dict(terms)["optimizer"], "6 bytes of states for one of parameters, not 2"
        assert told["parameters"] == dict(terms)["parameters"]


def test_a_profile_says_them_and_other_lengths_have_the_same(tmp_path: Path) -> None:
    costs = transformer()
    made = Profile(costs, 64, other_lengths=((32, costs),)).with_state(BF16)
    made.write(tmp_path / "profile.json")
    read = Profile.read(tmp_path / "profile.json")
    assert read == made
    assert made.to_json()["state"] == {"dtype": "bf16", "master": "fp32", "optimizer": "adamw"}
    assert {one.state for one in read.by_length.values()} == {BF16}
    assert "state" not in Profile(costs).to_json()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "bf17"}, "state has element type 'bf17' .did you mean 'bf16'"),
        ({"dtype": "bf16", "slots": ("float",)}, "element type 'float'"),
        ({"master": "fp32"}, "give their dtype too"),
        ({"optimizer": "adamv"}, "state has optimizer 'adamv' .did you mean 'adam"),
    ],
)
def test_what_nobody_knows_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        ParameterState(**given)  # type: ignore[arg-type]
