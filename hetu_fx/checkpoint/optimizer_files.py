"""Optimizer state by parameter name: every rank writes the elements that it counts, anyone reads what it owns.

One safetensors file per rank holds boxes of state tensors; its header says which box of which tensor each
entry is. Rank 0's `training_state.json` holds all numbers, options of the parameter groups and what the
caller adds. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.base.documents import told_as_damaged
from hetu_fx.checkpoint.open_folder import OpenFolder
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
    except (OSError, TypeError, ValueError) as error:
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
                    "is none of the model's\nhint: make the optimizer from model.parameters()"
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


@dataclass(frozen=True)
class RestoredTraining:
    """A training state that was read, and found to fit an optimizer; nothing of that has been changed."""

    options: tuple[Mapping[str, Any], ...]
    state: Mapping[nn.Parameter, dict[str, Any]]
    extra: Mapping[str, Any]

    def put(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Put it into the optimizer; returns the caller's own values."""
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)
        optimizer.state.clear()
        optimizer.state.update(self.state)  # type: ignore[arg-type]
        return dict(self.extra)


class TrainingFiles:
    """A saved training state: its document, and the files that hold its tensors."""

    def __init__(self, document: Any, boxes: BoxFiles) -> None:
        """Take a document and its files. Raises CheckpointError where the document is of another form."""
        told = document.get("format") if isinstance(document, dict) else None
        if told != FORMAT:
            raise CheckpointError(f"{boxes.where} has format {told!r}, expected {FORMAT!r}")
        self.boxes = boxes
        with told_as_damaged(f"the training state of {boxes.where}", CheckpointError):
            self.groups = [(tuple(map(str, group["params"])), dict(group["options"])) for group in document["groups"]]
            self.state = {name: dict(saved) for name, saved in document["state"].items()}
            self.extra = dict(document["extra"])

    @classmethod
    def open(cls, opened: OpenFolder, folder: str) -> TrainingFiles:
        """Open what `write_training_state` wrote on all ranks in a folder of an open one. Raises CheckpointError."""
        document = opened.document(f"{folder}/{STATE}", constants=True)
        files = [opened.tensors(name) for name in opened.names(folder, ".safetensors")]
        return cls(document, BoxFiles(files, opened.path / folder))

    def read(self, optimizer: torch.optim.Optimizer, parameters: Parameters) -> RestoredTraining:
        """Return the saved state for an optimizer over the same parameters, which is left as it is.

        Raises:
            CheckpointError: something of it does not fit.
        """
        names = _names(optimizer, parameters)
        self._check_groups(optimizer, names)
        self._check_state()
        with told_as_damaged(f"the training state of {self.boxes.where}", CheckpointError):
            pairs = zip(self.groups, optimizer.param_groups, strict=True)
            options = [_options(saved, now) for (_, saved), now in pairs]
            of_parameter = {name: own for (those, _), own in zip(self.groups, options, strict=True) for name in those}
            state = {
                parameters[name]: self._state(name, saved, of_parameter[name], parameters[name])
                for name, saved in self.state.items()
            }
        return RestoredTraining(tuple(options), state, self.extra)

    def _check_groups(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        here = [tuple(names[id(parameter)] for parameter in group["params"]) for group in optimizer.param_groups]
        saved = [those for those, _ in self.groups]
        if here != saved:
            ours, theirs = {n for g in here for n in g}, {n for g in saved for n in g}
            raise CheckpointError(
                f"the optimizer's parameters are not those of {self.boxes.where}: missing in the file "
                f"{sorted(ours - theirs)}, unknown here {sorted(theirs - ours)}, groups of "
                f"{[len(g) for g in here]} here and {[len(g) for g in saved]} in the file"
            )

    def _check_state(self) -> None:
        """Raise CheckpointError where some of a parameter's state is missing: files hold it, or others have steps."""
        boxes = {key for key in self.boxes.boxes if key[1]}
        nowhere = sorted(boxes - {(name, key) for name, saved in self.state.items() for key in saved})
        for group, _ in self.groups:
            with_steps = [name for name in group if "step" in self.state.get(name, ())]
            nowhere += [
                (name, "step") for name in group if with_steps and self.state.get(name) and name not in with_steps
            ]
        if nowhere:
            name, key = nowhere[0]
            raise CheckpointError(
                f"the training state of {self.boxes.where} is damaged: state {key!r} of {name!r} is missing"
                "\nhint: load another one"
            )

    def _state(
        self, name: str, saved: Mapping[str, Any], options: Mapping[str, Any], parameter: nn.Parameter
    ) -> dict[str, Any]:
        return {key: self._value(name, key, value, options, parameter) for key, value in saved.items()}

    def _value(self, name: str, key: str, saved: Any, options: Mapping[str, Any], parameter: nn.Parameter) -> Any:
        if not isinstance(saved, dict) or "shape" not in saved:
            value = _restore(saved)
            if key == "step" and not _is_finite(value):
                raise ValueError(f"state 'step' of {name!r} is {value}")
            on_device = isinstance(value, Tensor) and any(options.get(flag) for flag in ("capturable", "fused"))
            return value.to(parameter.device) if on_device else value
        shape, dtype = tuple(saved["shape"]), _dtype_of(saved["dtype"])
        if isinstance(parameter, HomeTensor) and shape == parameter.home_layout.shape:
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            self.boxes.check_shape((name, key), shape)  # before memory is taken for it
            value = torch.zeros(shape, dtype=dtype, device=parameter.device)
        self.boxes.check((name, key), value)
        self.boxes.fill((name, key), value)
        return value


def _options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's saved options, of the kinds that the optimizer has now. Raises ValueError."""
    missing = sorted(now.keys() - saved.keys() - {"params", "param_names"} - _OF_SCHEDULERS)
    if missing:
        raise ValueError(f"the options {missing} of a group are missing")
    restored = {key: _restore(value) for key, value in saved.items()}
    for key, value in restored.items():
        if key in now and not _fits(value, now[key]):
            raise ValueError(f"the option {key!r} is {value!r}, where the optimizer has {now[key]!r}")
    return restored


_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""Options that a scheduler has put into the groups: the one that was saved may have had none."""


def _fits(value: Any, now: Any) -> bool:
    """Tell whether an option can stand in the place of another."""
    if isinstance(value, float) and not math.isfinite(value):
        return bool(value == now)
    if value is None or now is None or isinstance(now, (bool, str)):
        return not isinstance(value, str) or isinstance(now, str)
    if isinstance(now, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(now) and all(map(_fits, value, now))
    return _is_finite(value)


def _is_finite(value: Any) -> bool:
    """Tell whether a value is a finite number, in a tensor of no dims or not."""
    number = value.item() if isinstance(value, Tensor) else value
    return isinstance(number, (int, float)) and math.isfinite(number)


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return found


def _restore(saved: Any) -> Any:
    match saved:
        case {"number": number, "dtype": dtype}:
            return torch.tensor(number, dtype=_dtype_of(dtype))
        case {"tuple": items}:
            return tuple(map(_restore, items))
        case list():
            return [_restore(item) for item in saved]
        case None | bool() | int() | float() | str():
            return saved
        case _:
            raise ValueError(f"{saved!r} is no value of an optimizer")
