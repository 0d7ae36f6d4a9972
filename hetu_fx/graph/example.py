"""Choose the example that a model is traced with: sizes that differ, a batch of more than one row.

Values never matter to the trace, so the example is made of zeros; only sizes, dtypes and the order of dims in memory
are the user's, and devices where it is not traced on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import Dim

from hetu_fx.base.dtypes import is_real
from hetu_fx.graph.neutral import stand_in_device
from hetu_fx.graph.row_dims import RowDims, count_rows, other_dims, with_rows

IMAGE_DIMS = 4


@dataclass(frozen=True)
class Example:
    """Inputs to trace with.

    Attributes:
        tensors: zeros of the example's sizes, by input name.
        row_dims: the dims that are given the number of rows.
    """

    tensors: Mapping[str, torch.Tensor]
    row_dims: RowDims

    @property
    def rows(self) -> list[Any]:
        """Return the number of rows of each input that has some."""
        return [self.tensors[name].shape[dim] for name, dim in self.row_dims.items()]

    def of_rows(self, rows: int) -> Example:
        """Return it with another number of rows."""
        made = {name: self.tensors[name].narrow(dim, 0, rows).contiguous() for name, dim in self.row_dims.items()}
        return replace(self, tensors={**self.tensors, **made})

    def dynamic_shapes(self, batch: Any, *, rest_is_dynamic: bool) -> tuple[dict[int, Any], ...]:
        """Return what torch.export takes: for each tensor, its dynamic dims, the batch dim being `batch`."""
        return tuple(self._dims(name, tensor, batch, rest_is_dynamic) for name, tensor in self.tensors.items())

    def _dims(self, name: str, tensor: torch.Tensor, batch: Any, rest_is_dynamic: bool) -> dict[int, Any]:
        free = rest_is_dynamic and not (is_real(tensor.dtype) and tensor.dim() >= IMAGE_DIMS)
        dims = {dim: Dim.AUTO if free and size > 1 else Dim.STATIC for dim, size in enumerate(tensor.shape)}
        if name in self.row_dims:
            dims[self.row_dims[name]] = batch
        return dims


def make_example(
    tensors: Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    row_dims: RowDims,
    *,
    keep_batch: bool,
    on_host: bool = False,
    least: int | None = None,
) -> Example:
    """Make the inputs to trace `model` with.

    Args:
        tensors: the user's example tensors by name.
        row_dims: which of their dims count the rows of the batch.
        keep_batch: keep the example's batch size; else it may grow, to differ from 1 and all other sizes.
        on_host: make them on the host, wherever the user's are.
        least: the rows to begin with, instead of the user's.
    """
    rows = least or count_rows(tensors, row_dims)
    rows = rows if keep_batch or not row_dims else _distinct_rows(rows, tensors, row_dims, model)
    on_meta = next((tensor.device for tensor in model.parameters() if tensor.is_meta), None)
    zeros = {
        name: _zeros(
            with_rows(tuple(tensor.shape), row_dims[name], rows) if name in row_dims else tuple(tensor.shape),
            order_in_memory(tensor),
            dtype=tensor.dtype,
            device=on_meta or (stand_in_device(tensor.device) if on_host else tensor.device),
        )
        for name, tensor in tensors.items()
    }
    return Example(zeros, row_dims)


def order_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of a tensor as they lie in memory, outermost first; of an expanded one as they do in a copy."""
    dims = range(tensor.dim())
    if tensor.is_contiguous():
        return tuple(dims)
    return tuple(sorted(dims, key=torch.empty_like(tensor, device="meta").stride, reverse=True))


def _zeros(shape: tuple[int, ...], order: tuple[int, ...], **how: Any) -> torch.Tensor:
    inverse = [order.index(dim) for dim in range(len(order))]
    return torch.zeros([shape[dim] for dim in order], **how).permute(inverse)


def _distinct_rows(rows: int, tensors: Mapping[str, torch.Tensor], row_dims: RowDims, model: torch.nn.Module) -> int:
    """Return the least number of rows from `rows` up that is no other size, so that equal means the same."""
    taken = {0, 1}
    for name, tensor in tensors.items():
        taken.update(tensor.shape[dim] for dim in other_dims(tensor, row_dims.get(name)))
    for tensor in (*model.parameters(), *model.buffers()):
        taken.update(tensor.shape)
    while rows in taken:
        rows += 1
    return rows
