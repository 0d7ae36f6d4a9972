"""Parameters, their gradients, what optimizers keep of them, and copies of these have names; results have none."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.switching.home.held import COPIED, GRADIENT, JOINT, Names
from hetu_fx.switching.home.ops import HomeTensor, as_home, home_layout

CUT = home_layout(Annotation.on((0, 1), Split(0, (2, 1))), (6, 4), 0, 2)


def made() -> tuple[nn.Parameter, HomeTensor, Names]:
    home = nn.Parameter(HomeTensor.from_full(torch.ones(6, 4), CUT))
    assert isinstance(home, HomeTensor)
    return home, home, Names({"w": home})


def test_a_parameter_and_what_shares_its_piece_have_its_name() -> None:
    _, home, names = made()
    assert names.name_of(home.local) == ("w",)
    assert names.name_of(home.detach().local) == ("w",)  # type: ignore[attr-defined]
    (held,) = names.held(("w",))
    assert held.counts is home


def test_what_an_optimizer_keeps_has_a_name_after_its_first_step() -> None:
    parameter, home, names = made()
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    assert names.name_of(home.local) == ("w",)  # there is an index now, without the state
    optimizer.step()
    average = optimizer.state[parameter]["exp_avg"]
    key = names.name_of(average.local)
    assert key is not None
    assert (key[0], key[2]) == ("w", "exp_avg")
    (held,) = names.held(key)
    assert held.counts is average


def test_copies_have_the_name_of_what_they_copy() -> None:
    _, home, names = made()
    first = copy.deepcopy(home.detach())
    with torch.no_grad():
        home.mul_(2)
    second = home.detach().clone()
    assert isinstance(first, HomeTensor)
    assert isinstance(second, HomeTensor)
    assert names.name_of(first.local) is None
    assert names.copy_name_of(first.local) == ("w", COPIED, "0", "torch.float32")
    assert names.copy_name_of(second.local) == ("w", COPIED, "1", "torch.float32")
    (held,) = names.held(("w", COPIED, "1", "torch.float32"))
    assert held.piece is second.local


def test_copies_that_have_been_written_have_a_name_only_if_they_are_alone() -> None:
    _, home, names = made()
    first = home.detach().clone().mul_(2)
    assert isinstance(first, HomeTensor)
    assert names.copy_name_of(first.local) is not None
    second = home.detach().clone().mul_(3)
    assert names.copy_name_of(first.local) is None
    del second
    assert names.copy_name_of(first.local) is not None


def backward(parameter: nn.Parameter) -> Tensor:
    made = as_home({"w": torch.ones(4, 4)}, {"w": parameter})["w"]
    if parameter.grad is None:
        parameter.grad = made
    else:
        parameter.grad.add_(made)
    return made


def test_the_gradient_that_the_last_backward_has_left_has_a_name_until_all_have_come_further() -> None:
    parameter, home, names = made()
    backward(parameter)
    gradient = home.grad
    assert isinstance(gradient, HomeTensor)
    key = names.key_of(gradient)
    assert key is not None
    assert key[:2] == ("w", GRADIENT)
    assert names.key_of(gradient.detach()) == key  # type: ignore[arg-type]
    assert names.key_of(gradient * 2) is names.key_of(gradient.clone()) is None  # type: ignore[arg-type]
    parameter.grad = None
    assert [held.counts is gradient for held in names.held(key)] == [True]
    names.forget_gradients()
    (gone,) = names.held(key)
    assert gone.writes > 1 << 40
    assert gone.after(0, str(CUT.annotation)) is None
    assert names.key_of(gradient) is None


def test_a_sum_of_gradients_has_the_name_of_the_last_backward_and_counts_what_was_added() -> None:
    parameter, home, names = made()
    backward(parameter)
    gradient = home.grad
    assert isinstance(gradient, HomeTensor)
    first = names.key_of(gradient)
    names.forget_gradients()
    assert names.key_of(gradient) == first
    added = backward(parameter)
    assert names.key_of(added) is None  # type: ignore[arg-type]
    key = names.key_of(gradient)
    assert key is not None
    assert key != first
    (held,) = names.held(key)
    assert (held.counts is gradient, held.writes) == (True, 1)
    later = (*key[:2], str(int(key[2]) + 1))
    assert names.held(later) == []
    assert first is not None
    assert names.held(first)[0].writes > 1 << 40


def test_results_have_no_name() -> None:
    _, home, names = made()
    result = home.detach() * 2
    assert isinstance(result, HomeTensor)
    assert names.name_of(result.local) is names.copy_name_of(result.local) is None
    assert names.held((JOINT, "0")) == []
