"""Choose the example that a model is traced with: sizes that differ, a batch of more than one row.

Values never matter to the trace, so the example is made of zeros; only sizes and dtypes are the user's, and devices
where it is not traced on the host. The batch dim is dim 0 of every tensor whose size there is that of the first tensor
with a dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim

from hetu_fx.base.dtypes import is_real
from hetu_fx.graph.neutral import stand_in_device

IMAGE_DIMS = 4


@dataclass(frozen=True)
class Example:
    """Inputs to trace with.

    Attributes:
        tensors: zeros of the example's sizes, by input name.
        batch_inputs: names of the inputs whose dim 0 is the batch.
        others: names of the other inputs that have dims.
    """

    tensors: Mapping[str, torch.Tensor]
    batch_inputs: tuple[str, ...]
    others: tuple[str, ...]

    def dynamic_shapes(self, batch: Any, *, rest_is_dynamic: bool) -> tuple[dict[int, Any], ...]:
        """Return what torch.export takes: for each tensor, its dynamic dims, the batch dim being `batch`."""
        return tuple(self._dims(name, tensor, batch, rest_is_dynamic) for name, tensor in self.tensors.items())

    def _dims(self, name: str, tensor: torch.Tensor, batch: Any, rest_is_dynamic: bool) -> dict[int, Any]:
        free = rest_is_dynamic and not (is_real(tensor.dtype) and tensor.dim() >= IMAGE_DIMS)
        dims = {dim: Dim.AUTO if free and size > 1 else Dim.STATIC for dim, size in enumerate(tensor.shape)}
        if name in self.batch_inputs:
            dims[0] = batch
        return dims


def make_example(
    tensors: Mapping[str, torch.Tensor], model: torch.nn.Module, *, keep_batch: bool, on_host: bool = False
) -> Example:
    """Make the inputs to trace `model` with.

    Args:
        tensors: the user's example tensors by name.
        keep_batch: keep the example's batch size; else it may grow, to differ from 1 and all other sizes.
        on_host: make them on the host, wherever the user's are.
    """
    batch = next((tensor.size(0) for tensor in tensors.values() if tensor.dim()), None)
    of_batch = tuple(name for name, tensor in tensors.items() if tensor.dim() and tensor.size(0) == batch)
    others = tuple(name for name, tensor in tensors.items() if tensor.dim() and name not in of_batch)
    rows = batch if keep_batch or batch is None else _distinct_rows(batch, tensors, of_batch, model)
    on_meta = next((tensor.device for tensor in model.parameters() if tensor.is_meta), None)
    zeros = {
        name: torch.zeros(
            (rows, *tensor.shape[1:]) if name in of_batch else tensor.shape,
            dtype=tensor.dtype,
            device=on_meta or (stand_in_device(tensor.device) if on_host else tensor.device),
        )
        for name, tensor in tensors.items()
    }
    return Example(zeros, of_batch, others)


def _distinct_rows(
    batch: int, tensors: Mapping[str, torch.Tensor], of_batch: tuple[str, ...], model: torch.nn.Module
) -> int:
    """Return the least number of rows from `batch` up that is no other size, so that equal means the same."""
    taken = {0, 1}
    for name, tensor in tensors.items():
        taken.update(tensor.shape[1:] if name in of_batch else tensor.shape)
    for tensor in (*model.parameters(), *model.buffers()):
        taken.update(tensor.shape)
    while batch in taken:
        batch += 1
    return batch
