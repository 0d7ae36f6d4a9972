"""transformers: `save_pretrained` of a parallel model holds one whole tensor at a time, on the rank that saves.

It is given tensors without memory in the place of home tensors, by which it names and shares out files. What writes a
file gets the whole of each tensor when its turn comes, from the other ranks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx import Handle
from hetu_fx.base.patches import Patch, register_patch

_STANDS_FOR = "hetu_fx_stands_for"  # at a tensor without memory: the model's handle, and the home tensor


class _Converted(RuntimeError):
    """Tensors were made of others, whose values are needed for that."""


def save_streamed(model: nn.Module) -> None:
    """Have a model of transformers save itself a tensor at a time."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    handle: Handle | None = getattr(model, "hetu", None)
    if kind is None or handle is None or not isinstance(model, kind):
        return
    save = model.save_pretrained
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get("state_dict") or model.state_dict()
        bound.arguments["state_dict"] = {name: _stand_in(handle, tensor) for name, tensor in given.items()}
        try:
            return save(*bound.args, **bound.kwargs)
        except _Converted:
            bound.arguments["state_dict"] = given
            return save(*bound.args, **bound.kwargs)

    object.__setattr__(model, "save_pretrained", save_pretrained)


def _stand_in(handle: Handle, tensor: Any) -> Any:
    if getattr(tensor, "shares_memory", True):  # no home tensor, or one that this rank has all of
        return tensor
    made = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
    vars(made)[_STANDS_FOR] = handle, tensor
    return made


def _streaming(save_file: Callable[..., Any]) -> Callable[..., Any]:
    """Make what writes a file fetch whole tensors one by one, where it is given some without memory."""

    @functools.wraps(save_file)
    def streaming(tensors: Mapping[str, Tensor], filename: Any, metadata: Any = None) -> Any:
        empty = [name for name, tensor in tensors.items() if tensor.is_meta]
        if not empty:
            return save_file(tensors, filename, metadata=metadata)
        if lost := [name for name in empty if not hasattr(tensors[name], _STANDS_FOR)]:
            raise _Converted(f"cannot save {lost[0]!r}, which is on the meta device and has no values")
        stands_for = {name: getattr(tensors[name], _STANDS_FOR) for name in empty}
        handle = stands_for[empty[0]][0]
        homes = {name: home for name, (_, home) in stands_for.items()}
        handle.write_tensors(filename, {**tensors, **homes}, metadata)
        return None

    return streaming


register_patch(
    Patch(
        "transformers", "transformers.modeling_utils", "", "safe_save_file",
        "save_pretrained of a parallel model would hold all of a file's tensors, whole, on the rank that saves", "5.24",
        _streaming,
    )
)  # fmt: skip
