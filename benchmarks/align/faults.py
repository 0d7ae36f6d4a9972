"""Planted faults: one op of a family made slightly wrong, which aligning must find and name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.align.subjects import Subject
from hetu_fx.base.torch_private import tree_leaves, tree_map_only
from hetu_fx_align.align import align_ops, runners_of
from hetu_fx_align.call import Call
from hetu_fx_align.difference import difference
from hetu_fx_align.distinct import distinct_ops
from hetu_fx_align.drift import whole_run
from hetu_fx_align.tolerances import is_compared
from hetu_fx_align.way import Runner, Way

Fault = Callable[[Tensor], Tensor]
LEAST = 5e-4
"""A fault must change a result by as much (relative), else it is none: a dtype changes nothing of zeros and ones."""


class _Gradient(torch.autograd.Function):
    """Hands numbers on, and 1.01 times their gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.01


def wrong_backward(op: str) -> Way:
    """Return a way in which the gradient of one op's first argument is 1 % too large."""
    return Way("wrong", replaced={op: lambda call, x, *args, **kw: call(_Gradient.apply(x), *args, **kw)})


def by_one_percent(result: Tensor) -> Tensor:
    """Return a result that is 1 % too large."""
    return result * 1.01


def by_a_transposed_dim(result: Tensor) -> Tensor:
    """Return a result whose last dim and the dim before are laid out the other way round."""
    return (
        result.transpose(-1, -2).reshape(result.shape)
        if result.dim() > 1
        else result.flip(0)
        if result.dim()
        else result
    )


def by_a_dtype(result: Tensor) -> Tensor:
    """Return a result that was bf16 on the way."""
    return result.bfloat16().to(result.dtype)


FAULTS: Mapping[str, Fault] = {
    "1 %": by_one_percent,
    "a transposed dim": by_a_transposed_dim,
    "a dtype": by_a_dtype,
}


@dataclass(frozen=True)
class Planted:
    """What came of a planted fault: the op, and what was found alone and in the whole."""

    family: str
    fault: str
    direction: str
    op: str
    named: str
    first: str

    @property
    def is_found(self) -> bool:
        """Tell whether this op and no other was named, alone and as the first of the whole."""
        return self.named == self.op and self.first == f"{self.direction} {self.op}"


def planted(subject: Subject, fault: str, number: int) -> Planted:
    """Plant a fault in an op that is chosen by a number, and look for it; every second one of 1 % is in a gradient."""
    backward = fault == "1 %" and number % 2 == 1
    op = _chosen(subject, fault, backward, random.Random(f"{subject.family} {fault} {number}"))
    way = _wrong(op, fault, backward)
    found = align_ops(subject.graph, subject.leaves, runners_of([way]), {})
    named = ", ".join(sorted({one.op.call.name for one in found if not one.is_within}))
    drifts = whole_run(subject.graph, subject.leaves, Runner(way)).first
    first = f"{drifts[0].direction} {drifts[0].op}" if drifts else "none"
    return Planted(subject.family, fault, "backward" if backward else "forward", op, named, first)


def _chosen(subject: Subject, fault: str, backward: bool, draw: random.Random) -> str:
    """Return the name of an op of which every call is changed by the fault."""
    good: dict[str, bool] = {}
    for op in distinct_ops(subject.graph, subject.leaves):
        fits = _carries_gradient(op.call) if backward else _is_changed(op.call, FAULTS[fault])
        good[op.call.name] = good.get(op.call.name, True) and fits
    return draw.choice(sorted(name for name, fits in good.items() if fits))


def _is_changed(call: Call, fault: Fault) -> bool:
    results = [leaf for leaf in tree_leaves(call.run()) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return any(is_compared(call.op, one) and difference(fault(one), one).error > LEAST for one in results)


def _carries_gradient(call: Call) -> bool:
    """Tell whether the first argument is a tensor that gets a gradient which is not zero."""
    first = call.leaves[0]
    if not isinstance(first, Tensor) or not call.needs_gradient[0]:
        return False
    own = first.detach().clone().requires_grad_()
    results = [leaf for leaf in tree_leaves(call.with_tensors((own, *call.tensors[1:])).run()) if leaf.requires_grad]
    torch.manual_seed(0)
    gradients = torch.autograd.grad(results, own, [torch.randn_like(one) for one in results], allow_unused=True)
    return gradients[0] is not None and bool(gradients[0].abs().max() > 1e-3)


def _wrong(op: str, fault: str, backward: bool) -> Way:
    if backward:
        return wrong_backward(op)

    def changed(tensor: Tensor) -> Tensor:
        return FAULTS[fault](tensor) if tensor.is_floating_point() else tensor

    return Way("wrong", replaced={op: lambda call, *args, **kw: tree_map_only(Tensor, changed, call(*args, **kw))})
