"""Products whose weights' gradients wait until they are asked for, instead of being made in the backward.

A backward that hands on the gradient of its input to another stage needs no more than that to do so; the gradients of
weights, about half of its work, can fill time in which the stage would wait (Qi et al., Zero Bubble Pipeline
Parallelism, ICLR 2024, section 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetu_fx.base.torch_private import gradient_hooks, run_backward
from hetu_fx.comm_ops.ops.product_from_factors import PRODUCTS, Product

LATER_PRODUCTS: Mapping[str, Product] = {str(op): product for op, product in PRODUCTS.items() if product.of_input}
"""The products whose weights' gradients can wait, by the name of the op: all but looking up."""

Ends = tuple[Tensor, Tensor | None]
"""A weight and a bias."""


@dataclass(frozen=True)
class _WaitingProduct:
    """What the gradients of a weight and a bias are made of: the product's input, and the gradient of its result."""

    product: Product
    x: Tensor
    gradient: Tensor
    weight: Tensor
    bias: Tensor | None

    def made(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Add to gradients that are there, without making a summand; yield what wants one otherwise, and that."""
        x, rows = self.x.flatten(0, -2), self.gradient.flatten(0, -2)
        if (total := _total(self.weight)) is not None:
            self.product.add_of_weight(total, x, rows)
        elif self.weight.requires_grad:
            yield self.weight, self.product.of_weight(x, rows, self.weight)
        if self.bias is not None and self.bias.requires_grad:
            yield self.bias, rows.sum(0)


def _total(root: Tensor) -> Tensor | None:
    """Return the gradient that may be added to in place: a leaf's whose hooks nobody waits for."""
    return root.grad if root.is_leaf and root.requires_grad and not any(gradient_hooks(root)) else None


class LaterProducts:
    """The products of one micro-batch whose weights' gradients are still to be made."""

    def __init__(self) -> None:
        self._waiting: list[_WaitingProduct] = []

    def add(self, waiting: _WaitingProduct) -> None:
        """Keep what a product's gradients are made of."""
        self._waiting.append(waiting)

    @torch.no_grad()
    def make(self) -> None:
        """Make all gradients that wait, and hand them to autograd as if its backward had come to the weights."""
        totals: dict[int, tuple[Tensor, Tensor]] = {}
        while self._waiting:
            for root, gradient in self._waiting.pop(0).made():
                known = totals.get(id(root))
                totals[id(root)] = root, gradient if known is None else known[1] + gradient
        if totals:
            roots, gradients = zip(*totals.values(), strict=True)
            run_backward(roots, gradients)


class _LaterProduct(torch.autograd.Function):
    """A product through which autograd finds the gradient of its input alone; what the others need is put by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Ends, later: LaterProducts, product: Product) -> Tensor:
        """Make the product; autograd does not look for tensors in a tuple."""
        ctx.save_for_backward(x)
        ctx.ends, ctx.later, ctx.product = ends, later, product
        return product.call(x, *ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Make the gradient of the input."""
        (x,) = ctx.saved_tensors
        ctx.later.add(_WaitingProduct(ctx.product, x.detach(), gradient, *ctx.ends))
        return ctx.product.of_input(gradient, ctx.ends[0]), None, None, None


def later_product(later: LaterProducts | None, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a product whose weights' gradients wait in `later`.

    They do not where nothing is collected, nor where no gradient of the input is wanted: no backward would come by.

    Args:
        later: of the micro-batch; None: autograd makes all gradients.
        name: of the op, one of `LATER_PRODUCTS`.
        x: rows, in any dims but the last.
        weight, bias: leaves of autograd, or casts of them.
    """
    product = LATER_PRODUCTS[name]
    if later is None or not x.requires_grad:
        return product.call(x, weight, bias)
    made: Tensor = _LaterProduct.apply(x, (weight, bias), later, product)  # type: ignore[no-untyped-call]
    return made
