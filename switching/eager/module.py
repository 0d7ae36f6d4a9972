"""The user's module as it is: which of its inputs have rows, and calls of it on some rows with given parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from hetu_fx.comm_ops.wire.consensus import LocalFacts
from hetu_fx.errors import BatchError
from hetu_fx.graph.bind import Batch
from hetu_fx.graph.containers import TensorSlot, Tree, flatten, unflatten
from hetu_fx.program.captures import Forward, batch_of, form_of
from hetu_fx.switching.step.batches import longest_side, sizes_besides_rows

OUTPUT, LOSS = "output", "loss"


@dataclass(frozen=True)
class EagerBatch:
    """One rank's batch of a step.

    Attributes:
        tree: its structure.
        tensors: its tensors by name.
        row_inputs: names of the tensors that have one entry per row.
        facts: what the other ranks must know.
    """

    tree: Tree
    tensors: Mapping[str, Tensor]
    row_inputs: tuple[str, ...]
    facts: LocalFacts


@dataclass(frozen=True)
class EagerOutput:
    """What the module made of some rows.

    Attributes:
        tree: structure of the model's own output; a bare tensor has the name "loss" or "output".
        values: its tensors by name, the loss left out.
        loss_name: where the loss stands; empty if there is none.
        loss: a mean over the rows.
    """

    tree: Tree
    values: Mapping[str, Tensor]
    loss_name: str = ""
    loss: Tensor | None = None


class EagerModule:
    """Calls a module's own forward on some rows of a batch.

    An input has rows if its dim 0 has the size that the first tensor with dims has there, in the example batch (or,
    for inputs that the example lacks, in the first batch that has them).
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, example: Batch) -> None:
        self.forward: Forward = model.forward
        self.signature = inspect.signature(self.forward)
        self.model, self.loss_fn = model, loss_fn
        self._caller = _Caller(model, self.forward, loss_fn)
        self._has_rows: dict[str, bool] = {}
        args, kwargs = ((), example) if isinstance(example, Mapping) else (tuple(example), {})
        self.read(args, kwargs, training=True)  # notes which inputs have rows

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> EagerBatch:
        """Read the arguments of a call of the model.

        Raises:
            BatchError: they do not fit the forward, or have no rows, or not the same number of them.
        """
        batch = batch_of(self.signature, args, kwargs)
        tree, tensors = flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        row_inputs = self._row_inputs(tensors)
        rows = {name: int(tensors[name].shape[0]) if tensors[name].dim() else -1 for name in row_inputs}
        if len(set(rows.values())) != 1 or -1 in rows.values():
            raise BatchError(
                f"inputs have numbers of rows {rows}, all inputs are {sorted(tensors)}; give one row per sample in "
                f"each of them (an input has rows if it had as many as the first one in the example batch)"
            )
        sizes = sizes_besides_rows(tensors, row_inputs)
        facts = LocalFacts(
            rows=rows[row_inputs[0]],
            # All ranks must cut the same inputs by rows.
            signature=f"{form_of(batch, training)} rows of {' '.join(row_inputs)}",
            sizes=tuple(sizes.values()),
            size_names=tuple(sizes),
            longest=longest_side(tensors, row_inputs),
        )
        return EagerBatch(tree, tensors, row_inputs, facts)

    def _row_inputs(self, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        rows = next((tensor.size(0) for tensor in tensors.values() if tensor.dim()), None)
        for name, tensor in tensors.items():
            self._has_rows.setdefault(name, tensor.dim() > 0 and tensor.size(0) == rows)
        return tuple(sorted(name for name in tensors if self._has_rows[name]))

    def call(self, batch: EagerBatch, rows: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> EagerOutput:
        """Run the module on `rows` of the row inputs, the batch's other inputs, and `parameters` by first name.

        Buffers are the module's own, and are written where it writes them. Ambient autocast and torch's random state
        apply as to any call of a module.
        """
        arguments = unflatten(batch.tree, {**batch.tensors, **rows})
        named = {f"model.{name}": tensor for name, tensor in parameters.items()}
        made, loss = functional_call(self._caller, named, (arguments,))
        tree, tensors = flatten(made)
        return _with_loss(tree, tensors, loss)


class _Caller(nn.Module):
    """Runs the model's own forward: calling the model itself would come back to hetu_fx."""

    def __init__(self, model: nn.Module, forward: Forward, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model, self.own_forward = model, forward
        # Not as a submodule: what a loss module holds is no state of the model.
        self.loss_of = None if loss_fn is None else partial(loss_fn)

    def forward(self, arguments: Any) -> tuple[Any, Tensor | None]:
        args, kwargs = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
        output = self.own_forward(*args, **kwargs)
        return output, None if self.loss_of is None else self.loss_of(output, *args, **kwargs)


def _with_loss(tree: Tree, tensors: Mapping[str, Tensor], given: Tensor | None) -> EagerOutput:
    """Find the loss: what loss_fn gave, else the output named so, else a scalar that comes first."""
    if given is not None and not is_loss(given):
        raise BatchError(
            f"loss_fn gave a tensor of shape {tuple(given.shape)} and {given.dtype}; return a mean over rows"
        )
    name = LOSS if given is not None or LOSS in tensors else next(iter(tensors), LOSS)
    loss = given if given is not None else tensors.get(name)
    if name not in (LOSS, "", "0") or loss is None or not is_loss(loss):
        return EagerOutput(_named(tree, OUTPUT), {n or OUTPUT: t for n, t in tensors.items()})
    own = LOSS if given is None and name == "" else OUTPUT
    values = {n or OUTPUT: t for n, t in tensors.items() if n != name}
    return EagerOutput(_named(tree, own), values, name or LOSS, loss)


def _named(tree: Tree, name: str) -> Tree:
    """Give the slot of a bare tensor a name."""
    return TensorSlot(name) if tree == TensorSlot("") else tree


def is_loss(tensor: Tensor) -> bool:
    """Tell whether a tensor can be a loss: a floating-point scalar."""
    return tensor.dim() == 0 and tensor.is_floating_point()
