"""Load what was exported, in any process: device graphs by variant and rank. `write` writes them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.annotations.local import local_part
from hetu_fx.base.documents import told_as_damaged
from hetu_fx.checkpoint.left_overs import place_of
from hetu_fx.checkpoint.manifest import MANIFEST
from hetu_fx.checkpoint.open_folder import OpenFolder
from hetu_fx.errors import CheckpointError, ExportError
from hetu_fx.export import FORMAT

_MANIFEST = "manifest.json"


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
    with opened_export(folder) as (opened, manifest):
        try:
            entry = chunks_of(manifest["variants"][variant]["ranks"][str(rank)])[chunk]
        except (KeyError, IndexError) as error:
            known = {name: sorted(v["ranks"]) for name, v in manifest["variants"].items()}
            asked = f"{variant!r} for rank {rank}" + f", chunk {chunk}" * (chunk > 0)
            raise ExportError(f"{folder} has no graph of variant {asked}; it has {known}") from error
        module = _module(opened, manifest, entry)
        loaded = ExportedRank(rank, module, tuple(entry["slots"]), tuple(entry["results"]))
        if manifest["weights"]:
            loaded.load_weights(_Beside(opened, manifest["weights"]))
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
    with opened_export(folder) as (opened, manifest):
        entry = manifest["single"]["graphs"].get(mode, {"missing": f"it has {sorted(manifest['single']['graphs'])}"})
        if "missing" in entry:
            raise ExportError(f"{folder} has no single-device graph for {mode}: {entry['missing']}")
        module = _module(opened, manifest, entry)
        if manifest["weights"]:
            beside = _Beside(opened, manifest["weights"])
            read = {name: beside[name] for name, _ in module.named_parameters()}
            module.load_state_dict(read, strict=False, assign=True)
        return module


def _module(opened: OpenFolder, manifest: Mapping[str, Any], entry: Mapping[str, str]) -> nn.Module:
    for reason in stale_torch(manifest):
        warnings.warn(f"{opened.path} is stale: {reason}", stacklevel=3)
    with opened.file(entry["file"]) as file:
        return torch.export.load(file).module()


def stale_torch(manifest: Mapping[str, Any]) -> list[str]:
    """Say that an export was written by another minor version of torch, if it was."""
    written, here = manifest["torch"], str(torch.__version__)
    if written.split(".")[:2] == here.split(".")[:2]:
        return []
    return [f"it was written by torch {written}, this is torch {here}; export again if it does not load"]


class _Beside(Mapping[str, Tensor]):
    """Whole parameters in the files beside the graphs; each is read when it is asked for, so that one takes memory."""

    def __init__(self, opened: OpenFolder, entries: Mapping[str, Any]) -> None:
        self.opened, self.entries = opened, entries

    def __getitem__(self, name: str) -> Tensor:
        file = self.opened.tensors(self.entries[name]["file"])
        file.check(name)
        return file.value(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@contextmanager
def opened_export(folder: Path) -> Iterator[tuple[OpenFolder, Mapping[str, Any]]]:
    """Give an export, open, and what it says of itself.

    Raises:
        ExportError: it is none, of another format, or damaged; or what is read of it meanwhile is.
    """
    try:
        with OpenFolder(place_of(folder)) as opened, told_as_damaged(f"the export {folder}", ExportError):
            yield opened, _read_manifest(opened)
    except CheckpointError as error:
        raise ExportError(f"{error}; export again") from error


def _read_manifest(opened: OpenFolder) -> Mapping[str, Any]:
    if opened.manifest is None or _MANIFEST not in opened:
        raise ExportError(f"{opened.path} is no export: there is no {_MANIFEST} that {MANIFEST} names in it")
    manifest = opened.document(_MANIFEST)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ExportError(
            f"{opened.path / _MANIFEST} has format {found!r}, this version reads {FORMAT!r}; export the model again, "
            f"or load it with the version of hetu_fx that wrote it"
        )
    told: Mapping[str, Any] = manifest
    return told
