"""Calls on disk, to be run again alone: tensors in a safetensors file, all else in a JSON file beside it; no pickle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetu_fx.base.documents import json_kind, json_text, nearest, read_json, write_atomically
from hetu_fx.errors import AlignError
from hetu_fx.transforms.rewrites.op_overrides import find_op
from hetu_fx_align.call import Call

FORMAT = "hetu_fx.op/1"
KEYS = ("format", "op", "args", "kwargs", "needs_gradient")
PLAIN = (bool, int, str, type(None))
_TORCH_VALUES: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
"""What is written as a name of torch's."""


def save_call(call: Call, path: Path) -> None:
    """Write a call to `path` (.json) and its tensors beside it (.safetensors).

    Raises:
        AlignError: an argument has no form in JSON, or a file cannot be written.
    """
    tensors: dict[str, Tensor] = {}

    def written(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[f"x{len(tensors)}"] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": f"x{len(tensors) - 1}"}
        return _written(call.name, value, written)

    args, kwargs = call.arguments()
    told = {"args": written(list(args)), "kwargs": {name: written(value) for name, value in kwargs.items()}}
    record = {"format": FORMAT, "op": call.name, **told, "needs_gradient": list(call.needs_gradient)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(path.with_suffix(".safetensors")))
        write_atomically(path, json_text(record) + "\n")
    except (OSError, SafetensorError) as error:
        raise AlignError(f"cannot write {path}: {error}\nhint: name another folder by --save") from error


def _written(op: str, value: Any, again: Callable[[Any], Any]) -> Any:
    """Return the JSON value of an argument that is no tensor."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (list, tuple)):
        return [again(item) for item in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for name, kind in _TORCH_VALUES.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise AlignError(f"{op}: an argument of type {type(value).__name__} cannot be saved\nhint: run the op in its model")


def read_call(path: Path) -> Call:
    """Read a call that `save_call` wrote.

    Raises:
        AlignError: the files are not there, torn, or name an op that this torch does not have.
    """
    record = read_json(path, AlignError)
    if not isinstance(record, dict):
        raise AlignError(
            f"{path} must be an object, not {json_kind(record)}\nhint: give a file of hetu-fx-align --save"
        )
    for key in record:
        if key not in KEYS:
            raise AlignError(f"{path}: unknown key {key!r}{nearest(str(key), KEYS)}")
    missing = [key for key in KEYS if key not in record]
    if missing or record["format"] != FORMAT:
        what = f"{missing[0]!r} is missing" if missing else f"format is {record['format']!r}, not {FORMAT!r}"
        raise AlignError(f"{path}: {what}\nhint: give a file of hetu-fx-align --save")
    try:
        tensors = load_file(str(path.with_suffix(".safetensors")))
    except (MemoryError, OSError, SafetensorError) as error:
        raise AlignError(f"cannot read the tensors of {path}: {error}\nhint: save the op again") from error
    return _call(path, record, tensors)


def _call(path: Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Call:
    op = find_op(record["op"], str(path))
    try:
        args = tuple(_read(value, tensors) for value in record["args"])
        kwargs = {name: _read(value, tensors) for name, value in record["kwargs"].items()}
        call = Call.of(op, args, kwargs)
        wanted = tuple(map(bool, record["needs_gradient"]))
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise AlignError(f"{path}: an argument cannot be read: {error!r}\nhint: save the op again") from error
    if len(wanted) != len(call.tensors):
        raise AlignError(
            f"{path}: 'needs_gradient' has {len(wanted)} entries for {len(call.tensors)} tensors"
            f"\nhint: save the op again"
        )
    return Call(op, call.leaves, call.tree, wanted)


def _read(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the argument that a JSON value stands for."""
    if isinstance(value, list):
        return [_read(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, name),) = value.items()
    if kind == "tensor":
        return tensors[name]
    if kind in _TORCH_VALUES:
        found = getattr(torch, name)
        if not isinstance(found, _TORCH_VALUES[kind]):
            raise ValueError(f"{name!r} is no {kind} of torch")
        return found
    return {"float": float, "device": torch.device}[kind](name)
