"""What a process hands over to `torch.distributed.checkpoint.async_save`: copies of its parts, in host memory.

torch's own stager asks each tensor for its memory, which is that of the whole one, on every process.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.torch_private import tree_map
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.home.tensor import wrap


class PartsStager:
    """Copies this process's part of each tensor, for a save that goes on while training does.

        saving = dcp.async_save(state, checkpoint_id=folder, async_stager=hetu_fx.PartsStager())

    Training stops as long as the parts are copied; `saving.result()` waits for the files.
    """

    # Of torch.distributed.checkpoint.staging.AsyncStager: what `stage` returns is done, nothing else is waited for.
    should_synchronize_after_execute = False

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state dict in host memory, in the same parts."""
        staged: dict[str, Any] = tree_map(_copied, state_dict)
        return staged

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has copied everything."""

    def close(self) -> None:
        """Hold nothing, so that nothing is let go."""


def _copied(value: Any) -> Any:
    if isinstance(value, HomeTensor):
        return wrap(_in_host_memory(value.local), value.home_layout)
    return _in_host_memory(value) if isinstance(value, Tensor) else copy.deepcopy(value)


def _in_host_memory(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
