"""A small model around a call of an op: what the op is given depends on rows of a batch, on parameters, or on both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tests.ops.database import OpCall, is_tensor

ROWS = 4
"""Rows of a batch where the op's own operands do not say how many there are."""


class Embedding(Enum):
    """What the op's operands are.

    A first dim is the batch wherever there are rows: in OWN_ROWS the first dim that torch's sample has, so that ops in
    which rows meet do meet rows; in BATCHED one that is put before it.
    """

    OWN_ROWS = "the first operand's first dim is the batch, the others are parameters"
    ALL_ROWS = "the first dim of every operand of as many rows is the batch, the others are parameters"
    BATCHED = "the first operand has a batch dim before its own, the others are parameters"
    WEIGHTS = "all operands are parameters, and the results meet rows"


class Role(Enum):
    """What a tensor operand is."""

    ROWS = "rows"  # an input of the model, scaled by a parameter if it is a number with gradient
    WEIGHT = "weight"  # a parameter if it is a number with gradient, else a buffer


@dataclass(frozen=True)
class Holding:
    """What parameters a model has.

    Attributes:
        jitter: how far those that scale rows are from 1, so that no two are alike.
        others: whether operands besides the first have parameters: not every op has gradients of them.
    """

    jitter: float
    others: bool


HOLDINGS = [Holding(jitter, others) for others in (True, False) for jitter in (0.1, 0.0)]
"""The first that an op allows is taken: not every op is defined a little aside of a sample, or has all gradients."""


class OpModel(nn.Module):
    """Calls an op with tensors made of inputs and parameters, and weighs its results; the loss is a mean of these.

    Args:
        op: the function.
        leaves, form: its arguments, flattened; tensors among them give shapes and values.
        roles: of the tensors, by their places among the leaves.
        holding: what parameters there are.
    """

    def __init__(
        self, op: Callable[..., Any], leaves: Sequence[Any], form: TreeSpec, roles: Mapping[int, Role], holding: Holding
    ) -> None:
        super().__init__()
        self.op, self.form, self.roles, self.holding = op, form, dict(roles), holding
        self.plain = {i: leaf for i, leaf in enumerate(leaves) if i not in roles}
        for i, role in self.roles.items():
            self._hold(i, leaves[i], role)

    def _hold(self, i: int, tensor: Tensor, role: Role) -> None:
        is_trained = has_gradient(tensor) and (i == 0 or self.holding.others)
        if role is Role.WEIGHT and not is_trained:
            self.register_buffer(f"given{i}", tensor.clone())
        elif role is Role.WEIGHT:
            self.register_parameter(f"given{i}", nn.Parameter(tensor.clone()))
        elif is_trained:
            scale = scales(tensor.shape[1:], tensor.dtype, self.holding.jitter)
            self.register_parameter(f"scale{i}", nn.Parameter(scale))

    def make_weights(self, results: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        """Make a weight for each element of the results, the same for all rows; `more` are those of another row."""
        for i, (result, other) in enumerate(zip(results, more, strict=True)):
            shape = [1 if size != larger else size for size, larger in zip(result.shape, other.shape, strict=True)]
            self.register_parameter(f"weight{i}", nn.Parameter(torch.rand(shape, dtype=torch.float64) + 0.5))

    def operands(self, batch: Mapping[str, Tensor]) -> list[Any]:
        """Return the op's arguments, flattened."""
        leaves = dict(self.plain)
        for i, role in self.roles.items():
            if role is Role.WEIGHT:
                leaves[i] = getattr(self, f"given{i}")
            else:
                scale = getattr(self, f"scale{i}", None)
                leaves[i] = batch[f"x{i}"] if scale is None else batch[f"x{i}"] * scale
        return [leaves[i] for i in range(len(leaves))]

    def made(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the op's results."""
        args, kwargs = tree_unflatten(self.operands(batch), self.form)
        return [value for value in tree_flatten(self.op(*args, **kwargs))[0] if isinstance(value, Tensor)]

    def results(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the op's results as real numbers."""
        return [as_real(value) for value in self.made(batch)]

    def forward(self, **batch: Tensor) -> Tensor:
        """Return the loss."""
        terms = []
        for i, result in enumerate(self.results(batch)):
            weighed = result * getattr(self, f"weight{i}")
            weighed = weighed * batch[f"row{i}"] if f"row{i}" in batch else weighed
            terms.append((weighed + weighed**2).mean())  # the squares keep it from being zero but for rounding
        return sum(terms[1:], terms[0])


def has_gradient(tensor: Tensor) -> bool:
    """Tell whether numbers of a tensor's dtype have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor as float64: of complex numbers both parts."""
    if tensor.is_complex():
        return torch.real(tensor).double() + 2 * torch.imag(tensor).double()
    return tensor.double()


def scales(shape: Sequence[int], dtype: torch.dtype, jitter: float) -> Tensor:
    """Return numbers a little below 1, no two alike, which keep what is in an op's domain there."""
    return (1 - jitter * torch.rand(tuple(shape), dtype=torch.float64)).to(dtype)


def embedded(
    op: Callable[..., Any], call: OpCall, embedding: Embedding, holding: Holding
) -> tuple[OpModel, dict[str, Tensor]] | None:
    """Return a model around a call and a batch for it; None if the call's operands do not allow that embedding.

    What the op itself raises on such operands is raised.
    """
    leaves, form = tree_flatten((call.args, dict(call.kwargs)))
    tensors = [i for i, leaf in enumerate(leaves) if is_tensor(leaf)]
    if embedding is Embedding.BATCHED and tensors and tensors[0] == 0:
        leaves[0] = torch.stack([_row(leaves[0], row) for row in range(ROWS)])
    roles = _roles(leaves, tensors, embedding)
    if roles is None:
        return None
    model = OpModel(op, leaves, form, roles, holding)
    batch = {f"x{i}": leaves[i].clone() for i, role in roles.items() if role is Role.ROWS}
    results, more = (model.results(given) for given in (_copied(batch), _with_another_row(batch)))
    model.make_weights(results, more)
    if embedding is Embedding.WEIGHTS:
        batch = {f"row{i}": torch.rand(ROWS, *[1] * r.dim(), dtype=torch.float64) for i, r in enumerate(results)}
    return (model, batch) if results else None


def _copied(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in batch.items()}


def _with_another_row(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of a row more: a model that takes no such batch has no dim of rows there."""
    return {name: torch.cat([tensor, tensor[-1:]]) for name, tensor in batch.items()}


def _row(tensor: Tensor, row: int) -> Tensor:
    return tensor * (1 - row / 16) if has_gradient(tensor) else tensor


def _roles(leaves: Sequence[Any], tensors: Sequence[int], embedding: Embedding) -> dict[int, Role] | None:
    """Return the roles of tensors by place; None if the embedding is none of them, or the same as an easier one."""
    roles = dict.fromkeys(tensors, Role.WEIGHT)
    if embedding is Embedding.WEIGHTS:
        return roles
    if not tensors or tensors[0] != 0 or leaves[0].dim() == 0 or leaves[0].shape[0] < 2:
        return None
    rows = leaves[0].shape[0]
    alike = [i for i in tensors if leaves[i].dim() > 0 and leaves[i].shape[0] == rows]
    if embedding is Embedding.ALL_ROWS:
        return None if len(alike) == 1 else roles | dict.fromkeys(alike, Role.ROWS)
    return roles | {0: Role.ROWS}
