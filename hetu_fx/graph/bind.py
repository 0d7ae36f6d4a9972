"""Match a batch with the inputs of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hetu_fx.errors import BatchError
from hetu_fx.graph.containers import Constant, Opaque, TensorSlot, Tree, flatten, unflatten, walk
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.graph.row_dims import RowDims, with_rows

Batch = Mapping[str, Any] | tuple[Any, ...]


def as_call(batch: Batch) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a batch as arguments of a call: by keyword, or positional where it is a tuple."""
    return ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})


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
    others: tuple[Constant | Opaque, ...] = ()
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
    def constants(self) -> Mapping[str, Any]:
        """Return its plain values by name."""
        return {leaf.name: leaf.value for leaf in self.others if isinstance(leaf, Constant)}

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
                f"the batch has objects that are neither tensors, plain values nor containers of them: {found}; "
                f"pass tensors, and call a model with its cache (past_key_values) inside `with model.hetu.whole():`, "
                f"as model.generate does"
            )


def input_tensors(graph: Graph, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by input name.

    Raises:
        BatchError: the batch has other keys, or other values that are baked in, than the captured one.
    """
    tree, tensors = flatten_batch(batch)
    wanted = {leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)}
    if set(tensors) != wanted:
        raise BatchError(
            f"the batch has tensors {sorted(tensors)}, the captured graph takes {sorted(wanted)}; "
            "capture the model again with such a batch"
        )
    _check_constants(graph.input_tree, tree)
    return tensors


def _check_constants(captured: Tree, given: Tree) -> None:
    before = {leaf.name: leaf.value for leaf in walk(captured) if isinstance(leaf, Constant)}
    now = {leaf.name: leaf.value for leaf in walk(given) if isinstance(leaf, Constant)}
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name):
            raise BatchError(
                f"batch entry {name!r} is {now.get(name)!r}, but {before.get(name)!r} is baked into the "
                "captured graph; pass it as a tensor, or capture the model again"
            )
