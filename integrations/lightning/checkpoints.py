"""Lightning's checkpoints as folders, whose tensors are written one at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_utilities import apply_to_collection
from safetensors.torch import load_file
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import CheckpointError

TENSORS, REST = "tensors.safetensors", "rest.ckpt"
"""The files of a folder: all tensors by number, and the checkpoint with these numbers in their place."""


class FolderCheckpoints(TorchCheckpointIO):
    """Makes checkpoints folders, for which the process that saves needs memory for one whole tensor.

        Trainer(strategy=HetuStrategy(checkpoint_io=FolderCheckpoints()))

    For a file of Lightning's own it needs memory for all of the model and of its optimizers. Such files are read, too.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a folder aside, then put it in the place of what is there.

        Raises:
            CheckpointError: a tensor has a dtype that safetensors files cannot hold; the path is not of a local file
                system.
            OSError: it cannot be written.
        """
        if "://" in str(path):
            raise CheckpointError(
                f"FolderCheckpoints writes to local file systems, and {path} is none\nhint: save to a local folder, "
                f"or leave checkpoint_io out"
            )
        place = Path(path)
        aside, old = (place.with_name(f".{place.name}.{what}") for what in ("partial", "old"))
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        numbers, tensors = dict[tuple[Any, ...], int](), dict[str, Tensor]()

        def number_of(tensor: Tensor) -> Tensor:
            number = numbers.setdefault(_identity(tensor), len(numbers))
            if str(number) not in tensors:
                tensors[str(number)] = _written(tensor.detach())
            return torch.tensor(number)

        with hetu_fx.named_storages():
            super().save_checkpoint(apply_to_collection(checkpoint, Tensor, number_of), aside / REST, storage_options)
            hetu_fx.save_file(tensors, aside / TENSORS)
        for file in aside.iterdir():
            _sync(file)
        self.remove_checkpoint(old)
        if place.exists():
            place.rename(old)  # which is there until the new one is
        aside.rename(place)
        self.remove_checkpoint(old)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a folder, or a file of Lightning's own. Raises FileNotFoundError, or SafetensorError for damage."""
        place = Path(path)
        if not place.is_dir():
            return super().load_checkpoint(path, map_location, weights_only)
        tensors = load_file(place / TENSORS)
        rest = super().load_checkpoint(place / REST, map_location, weights_only)
        loaded: dict[str, Any] = apply_to_collection(rest, Tensor, lambda number: tensors[str(int(number))])
        return loaded


def _sync(file: Path) -> None:
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return what names of one tensor, such as tied parameters, have in common."""
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _written(tensor: Tensor) -> Tensor:
    """Return a tensor as safetensors takes it: dense, with a storage of its own."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    is_own = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if is_plain and not is_own else tensor
