"""The plain module for a while: what is refused, and what stays, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import StateError
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.whole import check_room
from tests.model_zoo import ConvNet, conv_batch


def parallel() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = conv_batch(4, 0)
    return hetu_fx.auto_parallelize(ConvNet(), batch, plan=Plan.single()), batch


def test_inside_parameters_are_plain_and_outside_the_same_objects_as_before() -> None:
    model, batch = parallel()
    before = dict(model.named_parameters())
    with model.hetu.whole() as plain:
        assert plain is model
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        with model.hetu.whole():
            assert type(model.head.weight) is nn.Parameter
        assert type(model.head.weight) is nn.Parameter
    after = dict(model.named_parameters())
    assert all(after[name] is home for name, home in before.items())
    model(**batch)["loss"].backward()
    assert model.head.weight.grad is not None


def test_a_world_of_one_writes_inside_as_the_plain_module_does() -> None:
    model, batch = parallel()
    expected = model.head.weight.detach() * 2
    with model.hetu.whole(), torch.no_grad():
        model.head.weight.mul_(2)
        model(**batch)
    assert torch.equal(model.head.weight.detach(), expected)
    assert int(model.stem[1].num_batches_tracked) == 1


def test_a_world_of_one_replaces_and_trains_inside_as_the_plain_module_does() -> None:
    model, batch = parallel()
    with model.hetu.whole():
        model.head.weight = nn.Parameter(torch.zeros(13, 20))
        model(**batch)["loss"].backward()
    inside = model.head.weight.grad.clone()
    model.zero_grad()
    model(**batch)["loss"].backward()
    torch.testing.assert_close(model.head.weight.grad, inside)


def test_it_can_be_entered_in_inference_mode_and_used_outside_of_it_next() -> None:
    model, batch = parallel()
    with torch.inference_mode(), model.hetu.whole():
        model(**batch)
    with model.hetu.whole():
        x = batch["x"].clone().requires_grad_()
        assert torch.autograd.grad(model(x, batch["labels"])["loss"], x)[0].abs().sum() > 0


def test_ranks_without_room_are_named_with_what_they_lack() -> None:
    check_room([(("machine of node a", 200),)] * 2, 100)
    left = [(("machine of node a", 199),)] * 2 + [(("machine of node b", 100),)]
    with pytest.raises(StateError, match=r"100 bytes on every rank.*rank 0 has 199 bytes left of 'machine of node a'"):
        check_room(left, 100)
    with pytest.raises(StateError, match=r"rank 2 has 100 bytes left of 'machine of node b', which 1 ranks share"):
        check_room(left, 101)
