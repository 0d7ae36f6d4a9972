"""Bring a model's whole state to rank 0, some at a time, where there is room for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hetu_fx.checkpoint.tensor_files import bring_to_first, plan_shards
from hetu_fx.cluster.host import memory_left
from hetu_fx.comm_ops.wire.consensus import together
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import ExportError

MESSAGE_BYTES = 64 << 20  # of weights that travel at once: as much again is needed meanwhile


def gather_on_first(tensors: Mapping[str, Tensor], table: GroupTable) -> dict[str, Tensor]:
    """Return whole tensors in host memory on rank 0, nothing elsewhere; collective.

    Raises:
        ExportError: on every rank, where rank 0 has no room for them.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    needed = sum(sizes) + max([*sizes, min(sum(sizes), MESSAGE_BYTES)])  # a file is written a tensor at a time
    whole = "the single-device graphs on rank 0"
    together(table, lambda: check_room(needed, whole) if table.rank == 0 else None)
    found: dict[str, Tensor] = {}
    for names in plan_shards(tensors, MESSAGE_BYTES).values():
        found |= bring_to_first({name: tensors[name].detach() for name in names}, table)
    return found


def check_room(needed: int, what: str) -> None:
    """Refuse to gather weights for which this rank has no room.

    Raises:
        ExportError: says how many bytes are needed, and how many are left.
    """
    short = [f"{size} bytes are left of {name!r}" for name, size in memory_left(torch.device("cpu")) if size < needed]
    if short:
        raise ExportError(
            f"{what} need {needed} bytes of host memory for the weights, but {'; '.join(short)}; free memory there, or "
            f"export with weights=False, which writes them in safetensors files beside the graphs, some at a time"
        )
