"""Optimizers are numbered in the order of their first steps; what they have loaded whole is cut."""

from __future__ import annotations

import copy
import gc

import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.switching.home.held import numbered_optimizers
from hetu_fx.switching.home.ops import HomeTensor, home_layout

CUT = home_layout(Annotation.on((0, 1), Split(0, (2, 1))), (6, 4), 0, 2)


def stepped(parameter: nn.Parameter) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def number_of(optimizer: torch.optim.Optimizer) -> int | None:
    return next((number for known, number in numbered_optimizers() if known is optimizer), None)


def home() -> nn.Parameter:
    return nn.Parameter(HomeTensor.from_full(torch.ones(6, 4), CUT))


def test_optimizers_are_numbered_in_the_order_of_their_first_steps() -> None:
    never = torch.optim.SGD([home()])
    first, second = (stepped(home()) for _ in range(2))
    first.step()
    before = number_of(first)
    assert before is not None
    assert number_of(second) == before + 1
    assert number_of(never) is None


def test_a_number_is_not_given_again() -> None:
    gone = stepped(home())
    before = number_of(gone)
    assert before is not None
    del gone
    gc.collect()
    assert before not in [number for _, number in numbered_optimizers()]
    assert (number_of(stepped(home())) or 0) > before


def test_an_optimizer_of_other_parameters_which_one_process_may_have_alone_has_no_number() -> None:
    before = number_of(stepped(home()))
    assert before is not None
    assert number_of(stepped(nn.Parameter(torch.ones(2)))) is None
    assert number_of(stepped(home())) == before + 1


def test_state_that_is_loaded_whole_is_cut_before_and_after_the_first_step() -> None:
    whole = nn.Parameter(torch.arange(24.0).view(6, 4))
    saved = stepped(whole).state_dict()
    home = nn.Parameter(HomeTensor.from_full(whole.detach(), CUT))
    optimizer = torch.optim.SGD([home], lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(saved))
        home.grad = torch.zeros_like(home)
        optimizer.step()
        momentum = optimizer.state[home]["momentum_buffer"]
        assert type(momentum) is HomeTensor
        assert torch.equal(momentum.local, torch.full((4, 4), 0.9))
