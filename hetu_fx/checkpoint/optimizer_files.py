"""Optimizer state by parameter name: every rank writes the elements that it counts, anyone reads what it owns.

One safetensors file per rank holds boxes of state tensors; its header says which box of which tensor each
entry is. Rank 0's `training_state.json` holds all numbers, options of the parameter groups and what the
caller adds. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hetu_fx.checkpoint.tensor_files import BoxFiles, Key, RankShards
from hetu_fx.errors import CheckpointError
from hetu_fx.switching.home.ops import HomeTensor

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
    path = folder / f"training_state-{rank:05d}.safetensors"
    document = training_document(optimizer, parameters, extra)
    try:
        RankShards.of(state_tensors(optimizer, parameters), rank).write(path, {"format": FORMAT})
        if rank == 0:
            (folder / STATE).write_text(json.dumps(document, indent=1) + "\n")
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot write training state to {path}: {error}") from error


def training_document(
    optimizer: torch.optim.Optimizer, parameters: Parameters, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all but the tensors of an optimizer's state, as JSON: alike on every rank.

    Raises CheckpointError for a parameter without a name, or state that is neither tensors nor JSON values.
    """
    names = _names(optimizer, parameters)
    table: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        table[name] = {key: _describe(value, f"state {key!r} of {name!r}") for key, value in state.items()}
    groups = [_describe_group(group, names) for group in optimizer.param_groups]
    return {"format": FORMAT, "groups": groups, "state": table, "extra": dict(extra)}


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Iterator[tuple[Key, Tensor]]:
    """Yield the state tensors of an optimizer that have dims, or pieces, by parameter name and key."""
    names = _names(optimizer, parameters)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and (value.dim() or isinstance(value, HomeTensor)):
                yield (names[id(parameter)], key), value


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


def _describe_group(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    options = {k: _describe(v, f"option {k!r}") for k, v in group.items() if k not in ("params", "param_names")}
    return {"params": [names[id(parameter)] for parameter in group["params"]], "options": options}


def _describe(value: Any, what: str) -> Any:
    """Turn a value into JSON; tensors of no dims carry their number, others their shape and dtype."""
    match value:
        case Tensor() if value.dim() or isinstance(value, HomeTensor):
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


class TrainingFiles:
    """A saved training state: its document, and the files that hold its tensors."""

    def __init__(self, document: Mapping[str, Any], boxes: BoxFiles) -> None:
        self.document, self.boxes = document, boxes
        if document.get("format") != FORMAT:
            raise CheckpointError(f"{boxes.where} has format {document.get('format')!r}, expected {FORMAT!r}")

    @classmethod
    def open(cls, folder: Path) -> TrainingFiles:
        """Open what `write_training_state` wrote on all ranks. Raises CheckpointError."""
        path = folder / STATE
        try:
            document: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        return cls(document, BoxFiles(sorted(folder.glob("training_state-*.safetensors")), folder))

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
        """Return each parameter's saved options, once the groups are found to be the same."""
        here = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        saved = [group["params"] for group in self.document["groups"]]
        if here != saved:
            ours, theirs = {n for g in here for n in g}, {n for g in saved for n in g}
            raise CheckpointError(
                f"the optimizer's parameters are not those of {self.boxes.where}: missing in the file "
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
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            value = torch.zeros(shape, dtype=dtype, device=parameter.device)
        self.boxes.fill((name, key), value)
        return value


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
