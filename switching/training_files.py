"""Optimizer state by parameter name: every rank writes the elements that it counts, anyone reads what it owns.

One safetensors file per rank holds boxes of state tensors; its header says which box of which tensor each
entry is. Rank 0's `training_state.json` holds all numbers, options of the parameter groups and what the
caller adds. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from hetu_fx.annotations.region import Box, Interval
from hetu_fx.errors import CheckpointError
from hetu_fx.switching.home import HomeTensor
from hetu_fx.switching.home_layout import Chunk, index
from hetu_fx.switching.home_tensor import mark_written
from hetu_fx.switching.weight_files import open_safetensors, read_box

STATE = "training_state.json"
FORMAT = "hetu_fx.training/1"

Parameters = Mapping[str, nn.Parameter]


def write_training_state(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    extra: Mapping[str, Any],
    rank: int,
) -> None:
    """Write this rank's part of an optimizer's state. Every rank calls it; no communication.

    Raises CheckpointError for a parameter without a name, or state that is neither tensors nor JSON values.
    """
    names = _names(optimizer, parameters)
    tensors: dict[str, Tensor] = {}
    boxes: dict[str, list[Any]] = {}
    table: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        table[name] = {key: _describe(value, f"state {key!r} of {name!r}") for key, value in state.items()}
        for key, value in state.items():
            if not isinstance(value, Tensor) or (not value.dim() and not isinstance(value, HomeTensor)):
                continue
            for number, (box, piece) in enumerate(_pieces(value, rank)):
                entry = f"{name}/{key}/{number}"
                tensors[entry] = piece.detach().to("cpu").contiguous().clone()
                boxes[entry] = [name, key, box.bounds]
    path = folder / f"training_state-{rank:05d}.safetensors"
    try:
        save_file(tensors, str(path), metadata={"format": FORMAT, "boxes": json.dumps(boxes)})
        if rank == 0:
            document = {
                "format": FORMAT,
                "groups": [_describe_group(group, names) for group in optimizer.param_groups],
                "state": table,
                "extra": dict(extra),
            }
            (folder / STATE).write_text(json.dumps(document, indent=1) + "\n")
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot write training state to {path}: {error}") from error


def _names(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[int, str]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"parameter {place} of the optimizer's group {number}, of shape {tuple(parameter.shape)}, "
                    "is none of the model's; make the optimizer from model.parameters()"
                )
    return names


def _pieces(value: Tensor, rank: int) -> Iterator[tuple[Box, Tensor]]:
    """Yield what this rank writes of a tensor; plain tensors are the same everywhere, so rank 0 writes them."""
    if isinstance(value, HomeTensor):
        for box, place in value.home_layout.counted_chunks:
            yield box, value.local[index(place)]
    elif rank == 0:
        yield Box(tuple((0, size) for size in value.shape)), value


def _describe_group(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    options = {k: _describe(v, f"option {k!r}") for k, v in group.items() if k not in ("params", "param_names")}
    return {"params": [names[id(parameter)] for parameter in group["params"]], "options": options}


def _describe(value: Any, what: str) -> Any:
    """Turn a value into JSON; tensors of no dims carry their number, others their shape and dtype."""
    match value:
        case HomeTensor():
            return {"shape": list(value.shape), "dtype": _dtype_name(value)}
        case Tensor() if value.dim():
            return {"shape": list(value.shape), "dtype": _dtype_name(value)}
        case Tensor():
            return {"number": value.item(), "dtype": _dtype_name(value)}
        case tuple():
            return {"tuple": [_describe(item, what) for item in value]}
        case list() if not any(isinstance(item, Tensor) and item.dim() for item in value):
            return [_describe(item, what) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case _:
            kind = type(value).__name__
            raise CheckpointError(
                f"{what} is a {kind}; only tensors, numbers, texts and tuples or lists of numbers can be saved"
            )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class SavedBox:
    """One box of one state tensor in one file."""

    file: Path
    entry: str
    bounds: tuple[Interval, ...]


class TrainingFiles:
    """A saved training state, open for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.document = self._read_document()
        self.boxes: dict[tuple[str, str], list[SavedBox]] = {}
        self._files: dict[Path, Any] = {}
        for path in sorted(folder.glob("training_state-*.safetensors")):
            self._files[path] = open_safetensors(path)
            header = json.loads((self._files[path].metadata() or {}).get("boxes", "{}"))
            for entry, (name, key, bounds) in header.items():
                box = SavedBox(path, entry, tuple((start, stop) for start, stop in bounds))
                self.boxes.setdefault((name, key), []).append(box)

    def _read_document(self) -> dict[str, Any]:
        path = self.folder / STATE
        try:
            document: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if document.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {document.get('format')!r}, expected {FORMAT!r}")
        return document

    def load(self, optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Any]:
        """Put the saved state into an optimizer over the same parameters; give the caller's own values.

        Nothing is changed unless all of it fits. Raises CheckpointError.
        """
        names = _names(optimizer, parameters)
        groups = self._check_groups(optimizer, names)
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for name, saved in self.document["state"].items():
            parameter = parameters[name]
            on_device = any(groups[name].get(flag) for flag in ("capturable", "fused"))
            state[parameter] = {k: self._value(name, k, v, parameter, on_device) for k, v in saved.items()}
        for group, saved in zip(optimizer.param_groups, self.document["groups"], strict=True):
            group.update({key: _restore(value) for key, value in saved["options"].items()})
        optimizer.state.clear()
        optimizer.state.update(state)  # type: ignore[arg-type]
        return dict(self.document["extra"])

    def _check_groups(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Mapping[str, Any]]:
        """Give each parameter's saved options, once the groups are found to be the same."""
        here = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        saved = [group["params"] for group in self.document["groups"]]
        if here != saved:
            ours, theirs = {n for g in here for n in g}, {n for g in saved for n in g}
            raise CheckpointError(
                f"the optimizer's parameters are not those of {self.folder}: missing in the file "
                f"{sorted(ours - theirs)}, unknown here {sorted(theirs - ours)}, groups of "
                f"{[len(g) for g in here]} here and {[len(g) for g in saved]} in the file"
            )
        return {name: group["options"] for group in self.document["groups"] for name in group["params"]}

    def _value(self, name: str, key: str, saved: Any, parameter: nn.Parameter, on_device: bool) -> Any:
        if not isinstance(saved, dict) or "shape" not in saved:
            value = _restore(saved)
            return value.to(parameter.device) if isinstance(value, Tensor) and on_device else value
        shape, dtype = tuple(saved["shape"]), getattr(torch, saved["dtype"])
        if isinstance(parameter, HomeTensor) and shape == parameter.home_layout.shape:
            home = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            layout = home.home_layout  # type: ignore[attr-defined]
            chunks = list(zip(layout.boxes, layout.region.local_boxes, strict=False))
            self._fill(name, key, home.local, chunks)  # type: ignore[attr-defined]
            mark_written([home])  # type: ignore[list-item]
            return home
        plain = torch.zeros(shape, dtype=dtype, device=parameter.device)
        everything = Box(tuple((0, size) for size in shape))
        self._fill(name, key, plain, [(everything, everything)])
        return plain

    def _fill(self, name: str, key: str, dense: Tensor, chunks: Sequence[Chunk]) -> None:
        """Fill a dense tensor, given as boxes (global, local), from the saved boxes that meet them."""
        filled = 0
        for saved in self.boxes.get((name, key), []):
            for box, place in chunks:
                common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(saved.bounds, box.bounds, strict=True)]
                if all(start < stop for start, stop in common):
                    value = read_box(
                        self._files[saved.file].get_slice(saved.entry), _within(common, saved.bounds, None)
                    )
                    dense[_within(common, box.bounds, place.bounds)].copy_(value)
                    filled += value.numel()
        wanted = sum(math.prod(stop - start for start, stop in box.bounds) for box, _ in chunks)
        if filled != wanted:
            raise CheckpointError(
                f"{self.folder} holds {filled} of {wanted} elements of state {key!r} of {name!r}: "
                "a rank's file is missing"
            )


def _within(
    common: Sequence[Interval], bounds: Sequence[Interval], place: Sequence[Interval] | None
) -> tuple[slice, ...]:
    """Give the index of a common box in the dense tensor where `bounds` stands at `place` (None: at 0)."""
    starts = [0] * len(bounds) if place is None else [start for start, _ in place]
    return tuple(
        slice(start - low + at, stop - low + at)
        for (start, stop), (low, _), at in zip(common, bounds, starts, strict=True)
    )


def _restore(saved: Any) -> Any:
    match saved:
        case {"number": number, "dtype": dtype}:
            return torch.tensor(number, dtype=getattr(torch, dtype))
        case {"tuple": items}:
            return tuple(map(_restore, items))
        case list():
            return [_restore(item) for item in saved]
        case _:
            return saved
