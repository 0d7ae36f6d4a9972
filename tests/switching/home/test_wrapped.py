"""Pieces of gradients as home tensors: empty ones are used again, if nobody has them."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.switching.home.layout import home_layout
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.home.wrapped import Wrapped


def homes() -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Make two parameters, of which this rank has one, and pieces of their gradients."""
    pieces = {"here": torch.ones(2, 3), "there": torch.ones(0)}
    layouts = {name: home_layout(Annotation.on((number,)), (2, 3), 0, 2) for number, name in enumerate(pieces)}
    pieces = {name: piece.new_ones(layouts[name].local_shape) for name, piece in pieces.items()}
    return {name: nn.Parameter(HomeTensor(pieces[name].clone(), layouts[name])) for name in pieces}, pieces


def test_an_empty_gradient_is_the_same_in_every_step_and_another_one_is_not() -> None:
    (parameters, pieces), wrapped = homes(), Wrapped()
    before = {name: id(one) for name, one in wrapped.of(pieces, parameters).items()}
    assert id(wrapped.of(pieces, parameters)["there"]) == before["there"]
    memory = ref(pieces["here"])
    del pieces["here"]
    assert memory() is None


def test_an_empty_gradient_that_somebody_has_is_not_used_again() -> None:
    parameters, pieces = homes()
    holders = {
        "a variable": lambda one: one,
        "a weak reference": ref,
        "a gradient": lambda one: setattr(parameters["there"], "grad", one),
        "a graph of autograd": lambda one: torch.ones(2, 3, requires_grad=True) * one,
        "its flag": lambda one: id(one.requires_grad_()),
    }
    for what, hold in holders.items():
        wrapped = Wrapped()
        held = hold(wrapped.of(pieces, parameters)["there"])
        again = wrapped.of(pieces, parameters)["there"]
        assert not again.requires_grad, what
        assert parameters["there"].grad is not again, what
        if isinstance(held, int):
            assert held != id(again), what
        elif isinstance(held, ref):
            assert held() is not again, what
        else:
            assert held is not again, what


def test_what_a_script_left_on_an_empty_gradient_goes() -> None:
    (parameters, pieces), wrapped = homes(), Wrapped()
    wrapped.of(pieces, parameters)["there"].mine = 1
    assert vars(wrapped.of(pieces, parameters)["there"]).keys() == {"local", "home_layout"}


def test_an_empty_gradient_of_another_layout_is_another_one() -> None:
    (parameters, pieces), wrapped = homes(), Wrapped()
    before = id(wrapped.of(pieces, parameters)["there"])
    parameters["there"].home_layout = home_layout(Annotation.on((2,)), (2, 3), 0, 3)
    after = wrapped.of(pieces, parameters)["there"]
    assert (id(after) == before, after.home_layout is parameters["there"].home_layout) == (False, True)
