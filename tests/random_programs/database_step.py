"""A step of random models that calls an op of torch's operator database, near what torch tests it with."""

from __future__ import annotations

from functools import cache
from random import Random

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.ops.database import OpCall, calls, database, dtype_of, is_tensor
from tests.ops.model import as_real
from tests.random_programs.steps import STEPS
from tests.random_programs.writer import Value, Writer

SEED = 0
"""Of the samples."""
NAME = "called"
MOST = 48
"""Elements of an operand, and of a row of a result."""


class CalledOp(nn.Module):
    """Calls an op with a batch of what torch calls it with, each row moved a little by what the model has made of it.

    Args:
        name, index: of the op, and of its sample.
        width: of the rows that are given.
    """

    def __init__(self, name: str, index: int, width: int) -> None:
        super().__init__()
        call = _samples(name)[index]
        leaves, self.form = tree_flatten((call.args, dict(call.kwargs)))
        self.op, self.shape = database()[name].op, tuple(leaves[0].shape)
        self.leaves = {i: leaf for i, leaf in enumerate(leaves) if i and not is_tensor(leaf)}
        self.mix = nn.Linear(width, leaves[0].numel())
        for i, leaf in enumerate(leaves):
            if is_tensor(leaf):
                self.register_buffer(f"given{i}", leaf.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the op's first result, a row for each row of `x` (rows, width)."""
        near = 1 - 0.05 * torch.sigmoid(self.mix(x))
        given = {0: self.given0 * near.view(-1, *self.shape), **self.leaves}
        count = self.form.num_leaves
        leaves = [given[i] if i in given else getattr(self, f"given{i}") for i in range(count)]
        args, kwargs = tree_unflatten(leaves, self.form)
        found = tree_flatten(self.op(*args, **kwargs))[0]
        return as_real(next(value for value in found if isinstance(value, Tensor)))


@cache
def _samples(name: str) -> list[OpCall]:
    return list(calls(name, SEED))


@cache
def _names() -> list[str]:
    """Return the ops that have gradients, and compute in float64."""
    known = database().items()
    return [name for name, op in known if op.supports_autograd and dtype_of(name) is torch.float64]


def called(w: Writer, r: Random, h: Value) -> Value | None:
    """Call an op of the database on rows."""
    name = r.choice(_names())
    samples = _samples(name)
    index = r.randrange(len(samples)) if samples else 0
    width = 1
    for size in h.dims:
        width *= size
    dims = _dims(name, index, width) if samples else None
    if dims is None:
        return None
    op = w.module(f"CalledOp({name!r}, {index}, {width})")
    return w.value(f"{op}({h.name}.flatten(1))", dims)


@cache
def _dims(name: str, index: int, width: int) -> tuple[int, ...] | None:
    """Return the dims of a row of the result; None where there are no rows, or the op does not take the batch."""
    first = _samples(name)[index].args[0]
    if not is_tensor(first) or not 0 < first.numel() <= MOST or first.dim() == 0:
        return None
    try:
        op = CalledOp(name, index, width).double()
        found = [tuple(op(torch.randn(rows, width, dtype=torch.float64)).shape) for rows in (3, 4)]
    except Exception:  # torch's op does not take such operands
        return None
    has_rows = [shape[:1] for shape in found] == [(3,), (4,)] and found[0][1:] == found[1][1:]
    dims = found[0][1:]
    return dims if has_rows and dims and 0 < torch.Size(dims).numel() <= MOST else None


def use_database() -> None:
    """Let models have the step."""
    STEPS[NAME] = called
