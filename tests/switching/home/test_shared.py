"""Parameters, what optimizers keep of them, and copies of these have names; results and gradients have none."""

from __future__ import annotations

import copy

import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.switching.home.held import COPIED, JOINT, Names
from hetu_fx.switching.home.ops import HomeTensor, home_layout

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


def test_results_have_no_name() -> None:
    _, home, names = made()
    result = home.detach() * 2
    assert isinstance(result, HomeTensor)
    assert names.name_of(result.local) is names.copy_name_of(result.local) is None
    assert names.held((JOINT, "0")) == []
