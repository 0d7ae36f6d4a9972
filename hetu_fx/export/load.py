"""Load what was exported, in any process: device graphs by variant and rank. `write` writes them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.annotations.local import local_part
from hetu_fx.checkpoint.folders import digest
from hetu_fx.checkpoint.tensor_files import open_safetensors
from hetu_fx.errors import ExportError
from hetu_fx.export import FORMAT


@dataclass(frozen=True)
class ExportedRank:
    """One rank's exported graph, loaded.

    Call it with what the caller gives, by keyword; it returns results by name. Communication inside it goes to the
    ranks of torch.distributed's world. A loss is this replica's part: those of all replicas add up.

    Attributes:
        rank: whose graph it is.
        module: what torch.export gives: parameters have the model's names, and this rank's parts as values.
        slots: what the graph reads: name and kind, and of parameters and buffers which part, of which shape.
        results: what it makes: name and kind.
    """

    rank: int
    module: nn.Module
    slots: tuple[Mapping[str, Any], ...]
    results: tuple[Mapping[str, str], ...]

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """Return the keywords that the caller gives."""
        return tuple(slot["name"] for slot in self.slots if slot["kind"] not in ("parameter", "buffer", "constant"))

    def __call__(self, **given: Tensor) -> dict[str, Tensor]:
        """Run the graph. Raises `ExportError` where a value is missing, or nothing reads it."""
        if set(given) != set(self.needs):
            raise ExportError(
                f"the exported graph of rank {self.rank} takes {sorted(self.needs)} by keyword, not {sorted(given)}"
            )
        made: dict[str, Tensor] = self.module(**given)
        return made

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over this rank's parts of whole parameters and buffers, given by the model's names."""
        parts = {}
        for slot in self.slots:
            if slot["kind"] == "parameter" and slot["name"] not in tensors:
                raise ExportError(f"the exported graph of rank {self.rank} reads {slot['name']!r}, which is not given")
            if "lies" in slot and slot["name"] in tensors:
                part = local_part(tensors[slot["name"]], parse_annotation(slot["lies"]), self.rank)
                parts[slot["name"]] = part.contiguous().clone()
        self.module.load_state_dict(parts, strict=False, assign=True)


def load_exported(folder: str | Path, variant: str, rank: int, chunk: int = 0) -> ExportedRank:
    """Load one rank's graph of an exported variant, with its weights; warns where the export is stale.

    Under a plan with chunks a rank has a graph for each `chunk` of its stage.

    Raises:
        ExportError: the folder is no export, was written by another format, has no such graph, or is damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        entry = chunks_of(manifest["variants"][variant]["ranks"][str(rank)])[chunk]
    except (KeyError, IndexError) as error:
        known = {name: sorted(v["ranks"]) for name, v in manifest["variants"].items()}
        asked = f"{variant!r} for rank {rank}" + f", chunk {chunk}" * (chunk > 0)
        raise ExportError(f"{folder} has no graph of variant {asked}; it has {known}") from error
    module = _module(folder, manifest, entry)
    loaded = ExportedRank(rank, module, tuple(entry["slots"]), tuple(entry["results"]))
    if manifest["weights"]:
        loaded.load_weights(_Beside(folder, manifest["weights"]))
    return loaded


def chunks_of(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a manifest says of each graph of a rank."""
    return [entry, *entry.get("chunks", [])]


def load_single(folder: str | Path, mode: str) -> nn.Module:
    """Load one of the model's own graphs ("training", "evaluation", "inference"), with its weights.

    Plain `torch.export.load(path).module()` gives the same where the weights are inside. Errors and warnings are those
    of `load_exported`.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    entry = manifest["single"]["graphs"].get(mode, {"missing": f"it has {sorted(manifest['single']['graphs'])}"})
    if "missing" in entry:
        raise ExportError(f"{folder} has no single-device graph for {mode}: {entry['missing']}")
    module = _module(folder, manifest, entry)
    if manifest["weights"]:
        beside = _Beside(folder, manifest["weights"])
        read = {name: beside[name] for name, _ in module.named_parameters()}
        module.load_state_dict(read, strict=False, assign=True)
    return module


def _module(folder: Path, manifest: Mapping[str, Any], entry: Mapping[str, str]) -> nn.Module:
    for reason in stale_torch(manifest):
        warnings.warn(f"{folder} is stale: {reason}", stacklevel=3)
    return torch.export.load(checked(folder, entry)).module()


def stale_torch(manifest: Mapping[str, Any]) -> list[str]:
    """Say that an export was written by another minor version of torch, if it was."""
    written, here = manifest["torch"], str(torch.__version__)
    if written.split(".")[:2] == here.split(".")[:2]:
        return []
    return [f"it was written by torch {written}, this is torch {here}; export again if it does not load"]


class _Beside(Mapping[str, Tensor]):
    """Whole parameters in the files beside the graphs; each is read when it is asked for, so that one takes memory."""

    def __init__(self, folder: Path, entries: Mapping[str, Any]) -> None:
        self.folder, self.entries = folder, entries

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = open_safetensors(self.folder / self.entries[name]["file"]).get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def checked(folder: Path, entry: Mapping[str, str]) -> Path:
    """Return the path of an exported file that is as it was written. Raises `ExportError`."""
    path = folder / entry["file"]
    try:
        found = digest(path)
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}; export again") from error
    if found != entry["sha256"]:
        raise ExportError(f"{path} has changed since it was exported (its hash differs); export again")
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what an export says of itself. Raises `ExportError` where the folder is none, or of another format."""
    path = folder / "manifest.json"
    if not path.exists():
        raise ExportError(f"{folder} is no export: there is no manifest.json in it")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ExportError(f"{path} is damaged: {error}; export again") from error
    if manifest.get("format") != FORMAT:
        raise ExportError(
            f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT!r}; export the model again, or "
            f"load it with the version of hetu_fx that wrote it"
        )
    return manifest
