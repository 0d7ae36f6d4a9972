"""Load what was exported, in any process: device graphs by variant and rank. `write` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.annotations.local import local_part
from hetu_fx.checkpoint.folders import digest
from hetu_fx.errors import ExportError
from hetu_fx.export import FORMAT, OPS

_MOVED = {  # modules that folders of earlier versions name
    "hetu_fx.comm_ops": OPS[0],
    "hetu_fx.transforms.random_ops": OPS[1],
}


@dataclass(frozen=True)
class ExportedRank:
    """One rank's exported graph, loaded.

    Call it with values by (kind, name), such as {("input", "input_ids"): ids, ("parameter", "lm_head.weight"): w};
    it returns results by (kind, name). Communication inside it goes to the ranks of torch.distributed's world.
    """

    rank: int
    program: torch.export.ExportedProgram
    values: Mapping[tuple[str, str], Tensor]
    slots: tuple[Mapping[str, Any], ...]
    results: tuple[tuple[str, str], ...]

    def __call__(self, values: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
        """Run the graph."""
        keys = [(slot["kind"], slot["name"]) for slot in self.slots]
        values = {**self.values, **values}
        missing = [key for key in keys if key not in values]
        if missing:
            raise ExportError(f"the exported graph of rank {self.rank} needs values for {missing}")
        made = self.program.module()(*(values[key] for key in keys))
        return dict(zip(self.results, made, strict=True))

    def load_weights(self, tensors: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
        """Return this rank's parts of whole parameters and buffers, given by name, as values to call with."""
        parts = {}
        for slot in self.slots:
            key = slot["kind"], slot["name"]
            if "lies" not in slot or key in self.values:
                continue
            if slot["name"] not in tensors:
                raise ExportError(f"the exported graph of rank {self.rank} reads {slot['name']!r}, which is not given")
            part = local_part(tensors[slot["name"]], parse_annotation(slot["lies"]), self.rank)
            parts[key] = part.contiguous()
        return parts


def load_exported(folder: str | Path, variant: str, rank: int) -> ExportedRank:
    """Load one rank's graph of an exported variant.

    Raises:
        ExportError: the folder is no export, was written by another format, has no such graph, or is damaged.
    """
    manifest = _manifest(Path(folder))
    try:
        entry = manifest["variants"][variant]["ranks"][str(rank)]
    except KeyError as error:
        known = {name: sorted(v["ranks"]) for name, v in manifest["variants"].items()}
        raise ExportError(f"{folder} has no graph of variant {variant!r} for rank {rank}; it has {known}") from error
    path, beside = _checked(Path(folder), entry), _checked(Path(folder), entry["values"])
    _import(manifest["imports"])
    program = torch.export.load(path)
    results = tuple((result["kind"], result["name"]) for result in entry["results"])
    values = {(kind, name): t for key, t in load_file(beside).items() for kind, _, name in [key.partition("/")]}
    return ExportedRank(rank, program, values, tuple(entry["slots"]), results)


def _checked(folder: Path, entry: Mapping[str, str]) -> Path:
    """Return the path of an exported file that is as it was written."""
    path = folder / entry["file"]
    try:
        found = digest(path)
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}; export again") from error
    if found != entry["sha256"]:
        raise ExportError(f"{path} has changed since it was exported (its hash differs); export again")
    return path


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.exists():
        raise ExportError(f"{folder} is no export: there is no manifest.json in it")
    manifest: dict[str, Any] = json.loads(path.read_text())
    if manifest.get("format") != FORMAT:
        raise ExportError(f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT!r}")
    return manifest


def _import(names: list[str]) -> None:
    """Make the ops known that the file uses; names come from a file, so only our own modules are imported."""
    for name in names:
        if not name.startswith("hetu_fx."):
            raise ExportError(f"the export asks for module {name!r}, which is not part of hetu_fx; refused")
        import_module(_MOVED.get(name, name))
