"""Functions with a backward of their own are captured where it is the derivative of their forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import CaptureError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.capture_failure import is_derivative, reason
from tests.graph.compare import run_on_one_device


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Cubed(torch.autograd.Function):
    """A derivative written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.scale * 3 * x**2, None


class Product(torch.autograd.Function):
    """Keeps what the backward needs apart from the forward; a mask has no gradient."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x @ y, mask

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
        x, y, _ = ctx.saved_tensors
        return gradient @ y.t(), x.t() @ gradient, None


class Calls(nn.Module):
    def __init__(self, function: Any, *more: Any) -> None:
        super().__init__()
        self.layer, self.function, self.more = nn.Linear(4, 4), function, more

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.layer(x), *self.more)


def test_derivatives_are_told_from_estimators() -> None:
    x, y, mask = torch.randn(3, 4), torch.randn(4, 5), torch.ones(3, dtype=torch.long)
    assert is_derivative(Cubed, (x, 2.0))
    assert is_derivative(Product, (x, y, mask))
    assert not is_derivative(Rounded, (x,))


def of(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Make an autograd function of one tensor; `backward` is given it and the gradient."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return backward(ctx.saved_tensors[0], gradient)

    return Made


@pytest.mark.parametrize(
    "function",
    [
        of(lambda x: x.clamp(0, 1), lambda x, g: g),
        of(lambda x: x.clamp(-20, 20), lambda x, g: g),
        of(lambda x: x.clamp(0, 1), lambda x, g: g * (g * (x - x.clamp(0, 1)) >= 0)),
        of(torch.relu, lambda x, g: g),
        of(torch.relu, lambda x, g: g * (x > 0) * (g > 0)),
        of(lambda x: x.clamp(min=0).sqrt(), lambda x, g: g / (2 * x.clamp(min=0).sqrt() + 1e-6)),
        of(lambda x: x.view_as(x), lambda x, g: g.clamp(-5, 5)),
        of(lambda x: x.view_as(x), lambda x, g: g / (g.norm() + 1e-6)),
    ],
    ids=["clamp", "far clamp", "clamp back", "relu", "guided relu", "safe root", "clipped", "normalized"],
)
def test_what_is_the_derivative_of_some_numbers_alone_is_none(function: Any) -> None:
    assert not is_derivative(function, (torch.randn(3, 4),))


@pytest.mark.parametrize(
    "function",
    [
        of(torch.log, lambda x, g: g / x),
        of(torch.sqrt, lambda x, g: g / (2 * x.sqrt())),
        of(torch.exp, lambda x, g: g * x.exp()),
        of(torch.relu, lambda x, g: g * (x > 0)),
        of(lambda x: x.clamp(-1, 1), lambda x, g: g * (x.abs() < 1)),
        of(lambda x: x * x.sigmoid(), lambda x, g: g * (x.sigmoid() * (1 + x * (1 - x.sigmoid())))),
        of(lambda x: x.softmax(-1), lambda x, g: (y := x.softmax(-1)) * (g - (g * y).sum(-1, keepdim=True))),
        of(lambda x: x / x.norm(), lambda x, g: (g - x * (g * x).sum() / x.norm() ** 2) / x.norm()),
    ],
    ids=["log", "root", "exp", "relu", "clamp", "swish", "softmax", "norm"],
)
def test_derivatives_are_known_whatever_numbers_they_take(function: Any) -> None:
    assert is_derivative(function, (torch.randn(3, 4),))


def test_a_function_that_fails_on_random_numbers_is_not_known_to_be_one() -> None:
    assert not is_derivative(Cubed, (torch.randn(3),))


def test_an_estimator_is_refused_with_its_line_and_the_way_out() -> None:
    with pytest.raises(CaptureError, match=r"(?s)Rounded \(test_capture_failure.py:\d+\).*hint: .*capture=\"eager\""):
        capture(Calls(Rounded), (torch.randn(5, 4),))


def test_a_derivative_written_by_hand_is_captured() -> None:
    model, x = Calls(Cubed, 2.0), torch.randn(6, 4)
    (output,) = run_on_one_device(capture(model, (torch.randn(5, 4),)), model, (x,)).values()
    torch.testing.assert_close(output, model(x))


def test_functions_are_captured_and_checked_where_apply_is_of_c_as_in_torch_2_14() -> None:
    model, x = Calls(Cubed, 2.0), torch.randn(6, 4)
    of_c = vars(torch._C._FunctionBase)["apply"]
    with mock.patch.object(torch.autograd.Function, "apply", of_c):
        (output,) = run_on_one_device(capture(model, (torch.randn(5, 4),)), model, (x,)).values()
        with pytest.raises(CaptureError, match="Rounded"):
            capture(Calls(Rounded), (torch.randn(5, 4),))
    torch.testing.assert_close(output, model(x))


def test_an_error_without_a_message_has_a_reason() -> None:
    assert reason(AssertionError()) == "AssertionError: no message"


class Casts(nn.Module):
    """Casts its weight where it stands, as libraries of losses do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = nn.Parameter(torch.ones(3, 2)), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.to(self.dtype)
        return (x @ self.weight.to(x.dtype)).sum()


def test_a_parameter_may_be_given_its_own_data_and_no_other() -> None:
    batch = (torch.randn(4, 3),)
    weight, _ = (leaf.name for leaf in capture(Casts(torch.float32), batch).leaves)
    assert weight == "weight"
    with pytest.raises(CaptureError, match=r"other data \(test_capture_failure\.py:"):
        capture(Casts(torch.float64), batch)
