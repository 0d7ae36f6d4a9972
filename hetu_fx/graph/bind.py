"""Match a batch with the inputs of a graph."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hetu_fx.errors import BatchError
from hetu_fx.graph.containers import (
    Constant,
    Leaf,
    Opaque,
    TensorSlot,
    Tree,
    flatten,
    passed_names,
    passing,
    unflatten,
    walk,
)
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.graph.row_dims import RowDims, with_rows

Batch = Mapping[str, Any] | tuple[Any, ...]
_MOST_SHOWN = 80  # letters of a plain value

_NO_BATCHES: tuple[tuple[type, str], ...] = (
    (torch.Tensor, "a tensor, whose rows would be taken for arguments\nhint: give a tuple of arguments, (batch,), or a "
     "mapping of their names"),
    (DataLoader, "a DataLoader\nhint: give one batch of it, next(iter(loader))"),
    (Dataset, "a Dataset\nhint: give one batch, as a DataLoader makes it of samples"),
)  # fmt: skip
"""What is taken for a batch, and is none, with what to give instead."""


def as_call(batch: Batch) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a batch as arguments of a call: by keyword, or positional where it is a tuple or a list.

    Raises:
        BatchError: it is none of these.
    """
    if isinstance(batch, Mapping):
        return (), batch
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    told = next((told for kind, told in _NO_BATCHES if isinstance(batch, kind)), f"a {type(batch).__name__}")
    raise BatchError(f"a batch is a mapping of forward's arguments by name, or a tuple of them, and this is {told}")


class LossCall:
    """What a model's forward takes of a batch, and what makes the loss of its output: each by the names that it has.

    Args:
        forward: of the model.
        loss_fn: called with the output and what it names of the batch, all where it takes any; None: there is none.

    Attributes:
        signature: of a call of both: forward's arguments, and after them those that the loss alone takes.
    """

    def __init__(self, forward: Callable[..., Any], loss_fn: Callable[..., Any] | None) -> None:
        self._forward = inspect.signature(forward).parameters
        self._loss = None if loss_fn is None else _signature_of_loss(loss_fn)
        self._own = tuple(self._of_loss_alone())
        self.signature = self._whole(inspect.signature(forward))

    def _of_loss_alone(self) -> Iterator[str]:
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        for place, (name, parameter) in enumerate(() if self._loss is None else self._loss.parameters.items()):
            if place and parameter.kind in named and name not in self._forward:
                yield name

    def _whole(self, forward: inspect.Signature) -> inspect.Signature:
        kinds = [parameter.kind for parameter in self._forward.values()]
        if not self._own or inspect.Parameter.VAR_POSITIONAL in kinds:
            return forward
        own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in self._own]
        places = [place for place, kind in enumerate(kinds) if kind > inspect.Parameter.POSITIONAL_OR_KEYWORD]
        place, parameters = min(places, default=len(kinds)), list(self._forward.values())
        return forward.replace(parameters=[*parameters[:place], *own, *parameters[place:]])

    def of_model(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keyword arguments of a call that forward takes."""
        return {name: value for name, value in given.items() if name not in self._own} if self._own else given

    def of_loss(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keyword arguments of a call that the loss takes."""
        assert self._loss is not None, "there is one"
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._loss.parameters.values()):
            return given
        _, *names = self._loss.parameters  # the first is the output, whatever it is called
        return {name: value for name, value in given.items() if name in names}

    def missing(self, batch: Batch) -> str:
        """Return why the loss cannot be made of a batch; empty if it can."""
        args, kwargs = as_call(batch)
        try:
            if self._loss is not None:
                self._loss.bind(None, *args, **self.of_loss(kwargs))
        except TypeError as error:
            return str(error)
        return ""


def _signature_of_loss(loss_fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):  # a function of C tells nothing
        return inspect.signature(lambda output, *args, **kwargs: None)


def output_and_loss(model: nn.Module, loss_fn: Callable[..., Any] | None, batch: Batch) -> tuple[Any, Any]:
    """Call a model on a batch, and what makes the loss of its output, if there is such."""
    args, kwargs = as_call(batch)
    call = LossCall(model.forward, loss_fn)
    output = model(*args, **call.of_model(kwargs))
    return output, None if loss_fn is None else loss_fn(output, *args, **call.of_loss(kwargs))


def flatten_batch(batch: Batch) -> tuple[Tree, dict[str, torch.Tensor]]:
    """Return the structure of a batch and its tensors by input name."""
    return flatten(dict(batch) if isinstance(batch, Mapping) else tuple(batch))


@dataclass(frozen=True, eq=False)
class GivenBatch:
    """A batch that has been taken apart, once for all who look at it.

    Attributes:
        batch: as it was given.
        tensors: its tensors by input name.
        others: what it has besides tensors.
        own_tree: its structure; None of a mapping of tensors alone, as most are, whose tree is seldom asked for.
    """

    batch: Batch
    tensors: Mapping[str, torch.Tensor]
    others: tuple[Leaf, ...] = ()
    own_tree: Tree | None = None

    @classmethod
    def of(cls, batch: Batch) -> GivenBatch:
        """Take a batch apart."""
        if isinstance(batch, Mapping) and all(isinstance(value, torch.Tensor) for value in batch.values()):
            return cls(batch, {str(key): value for key, value in batch.items()})
        tree, tensors = flatten_batch(batch)
        return cls(batch, tensors, tuple(leaf for leaf in walk(tree) if not isinstance(leaf, TensorSlot)), tree)

    @property
    def tree(self) -> Tree:
        """Return its structure."""
        return flatten_batch(self.batch)[0] if self.own_tree is None else self.own_tree

    @property
    def structure(self) -> Any:
        """Return what is equal for batches of one structure: their keys where that is all there is to them."""
        return tuple(self.batch) if self.own_tree is None else self.own_tree

    @property
    def passable(self) -> Mapping[str, Any]:
        """Return by name its plain values that a forward may pass on without reading them."""
        return passing(self.tree)[1] if self.others else {}

    def plain(self, passed: Collection[str] = ()) -> Mapping[str, str]:
        """Return texts by name that are equal where plain values are; of those that are `passed`, where classes are."""
        if not self.others:
            return {}
        tree, values = passing(self.tree)
        told = {name: type(value).__name__ if name in passed else _brief(value) for name, value in values.items()}
        return told | {leaf.name: repr(leaf.value) for leaf in walk(tree) if isinstance(leaf, Constant)}

    def plain_facts(self, passed: Collection[str] = ()) -> dict[str, str]:
        """Return the same by what it is of, for messages."""
        return {f"input {name!r}": text for name, text in self.plain(passed).items()}

    @property
    def objects(self) -> Mapping[str, str]:
        """Return the types of what is neither a tensor, a plain value nor a container of them, by name."""
        return {leaf.name: leaf.type_name for leaf in self.others if isinstance(leaf, Opaque)}

    def of_rows(self, row_dims: RowDims, rows: int) -> Batch:
        """Return a batch like it of so many rows, these again and again; zeros where it has none."""

        def of_rows(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            if not tensor.shape[dim]:
                return tensor.new_zeros(with_rows(tuple(tensor.shape), dim, rows))
            return tensor.index_select(dim, torch.arange(rows, device=tensor.device) % tensor.shape[dim])

        made = {name: of_rows(self.tensors[name].detach(), dim) for name, dim in row_dims.items()}
        batch: Batch = unflatten(self.tree, {**self.tensors, **made})
        return batch

    def check_no_objects(self) -> None:
        """Refuse objects whose values no graph follows, and of whose rows nothing is known: caches, arrays, and such.

        Raises:
            BatchError: the batch has some.
        """
        if self.objects:
            found = ", ".join(f"{name!r} ({kind})" for name, kind in self.objects.items())
            raise BatchError(
                f"the batch has objects that are neither tensors, plain values nor containers of them: {found}\n"
                f"hint: pass tensors, and call a model with its cache (past_key_values) inside "
                f"`with model.hetu.whole():`, as model.generate does"
            )


def _brief(value: Any) -> str:
    """Return what is equal for equal values: their text, or its beginning, and a hash of it, where it is long."""
    text = repr(value)
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[: _MOST_SHOWN - 20]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def input_tensors(graph: Graph, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by input name.

    Raises:
        BatchError: the batch has other keys, or other values that are baked in, than the captured one.
    """
    tree, tensors = flatten_batch(batch)
    wanted = {leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)}
    if set(tensors) != wanted:
        raise BatchError(
            f"the batch has tensors {sorted(tensors)}, the captured graph takes {sorted(wanted)}\n"
            "hint: capture the model again with such a batch"
        )
    _check_constants(graph.input_tree, tree)
    return tensors


def _check_constants(captured: Tree, given: Tree) -> None:
    known, _ = passing(given, passed_names(captured))
    before, now = (
        {leaf.name: leaf.value for leaf in walk(tree) if isinstance(leaf, Constant)} for tree in (captured, known)
    )
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name):
            raise BatchError(
                f"batch entry {name!r} is {now.get(name)!r}, but {before.get(name)!r} is baked into the "
                "captured graph\nhint: pass it as a tensor, or capture the model again"
            )
