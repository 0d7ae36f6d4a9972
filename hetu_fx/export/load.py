"""Tell what is in an export, whether its files are as they were written, and whether it is stale; load it, anywhere."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.annotations.local import local_part
from hetu_fx.base.documents import told_as_damaged
from hetu_fx.checkpoint.folders import find_folder
from hetu_fx.checkpoint.manifest import MANIFEST
from hetu_fx.checkpoint.open_folder import OpenFolder
from hetu_fx.errors import CheckpointError, ExportError
from hetu_fx.export import FORMAT
from hetu_fx.plans.plan import Plan

_MOST_TOLD = 5


@dataclass(frozen=True)
class ExportRecord:
    """An export, looked at.

    Attributes:
        folder: where it is.
        manifest: what it says of itself.
        damaged: files that are missing, or not as they were written.
        stale: why its graphs may not be those of here and now.
    """

    folder: Path
    manifest: Mapping[str, Any]
    damaged: tuple[str, ...]
    stale: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Tell whether all is there, and nothing is known to have changed."""
        return not self.damaged and not self.stale

    def explain(self) -> str:
        """Return what is there as lines of text."""
        return "\n".join(self._lines())

    def to_json(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {**self.manifest, "folder": str(self.folder), "damaged": self.damaged, "stale": self.stale}

    def _lines(self) -> Iterator[str]:
        model = self.manifest["model"]
        yield f"{self.folder}: {model['class']}, {len(model['parameters'])} parameters"
        yield f"torch {self.manifest['torch']}, {self.manifest['world']} process(es)"
        for mode, entry in self.manifest["single"]["graphs"].items():
            made = f"{', '.join(entry['inputs'])} -> {', '.join(entry['outputs'])}" if "file" in entry else ""
            yield f"  {mode:<10}  {entry.get('file', 'none: ' + entry.get('missing', ''))}  {made}".rstrip()
        for name, variant in self.manifest["variants"].items():
            yield f"  variant {name}: {variant['plan']['file']}"
            for rank, entry in variant["ranks"].items():
                for one in _chunks_of(entry):
                    yield f"    rank {rank}: {one['file']}  pipeline {one['pipeline']}, stage {one['stage']}"
        yield "  weights: " + ("next to the graphs" if self.manifest["weights"] else "inside the graphs")
        yield from (f"damaged: {reason}" for reason in self.damaged)
        yield from (f"stale: {reason}" for reason in self.stale)


def check_exported(folder: str | Path, *, model: nn.Module | None = None, plan: Plan | None = None) -> ExportRecord:
    """Look at an export: its files' sums, the version of torch, and what is given of the present.

    Args:
        folder: that `model.hetu.export` wrote.
        model: the model as it is now, plain or parallel; its values play no part, it may be on the meta device.
        plan: the plan that is to run now.

    Raises:
        ExportError: the folder is no export, or of another format.
    """
    folder = Path(folder)
    with _opened_export(folder) as (opened, manifest):
        stale = _stale_torch(manifest)
        if model is not None:
            stale += _stale_model(manifest["model"], model_facts(model))
        if plan is not None:
            stale += _stale_plan(folder, manifest, plan)
        return ExportRecord(folder, manifest, tuple(_damaged(opened)), tuple(stale))


def _damaged(opened: OpenFolder) -> Iterator[str]:
    for name in opened.manifest.files if opened.manifest else ():
        try:
            opened.check_sums([name])
        except CheckpointError as error:
            yield f"{error}; export again"


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return what an export remembers of a model: its class, a hash of its modules, its parameters' forms."""
    lines = (f"{name}: {type(module).__qualname__} {module.extra_repr()}" for name, module in model.named_modules())
    return {
        "class": type(model).__qualname__,
        "modules": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
        "parameters": {
            name: [list(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad]
            for name, p in model.named_parameters()
        },
    }


def _stale_model(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what is unlike what was exported."""
    told = []
    if before["class"] != now["class"]:
        told.append(f"the model is a {now['class']}, a {before['class']} was exported")
    was, there = before["parameters"], now["parameters"]
    changed = [
        f"{name}: {_form(was.get(name))} -> {_form(there.get(name))}"
        for name in sorted(was.keys() | there.keys())
        if was.get(name) != there.get(name)
    ]
    if changed:
        more = f" and {len(changed) - _MOST_TOLD} more" if len(changed) > _MOST_TOLD else ""
        told.append(f"parameters have changed (exported -> now): {'; '.join(changed[:_MOST_TOLD])}{more}")
    if not told and before["modules"] != now["modules"]:
        told.append("the model's modules, or what they were made with, have changed since it was exported")
    return told


def _form(parameter: Any) -> str:
    if parameter is None:
        return "none"
    shape, dtype, is_trained = parameter
    return f"{dtype}{shape}{'' if is_trained else ' frozen'}"


def _stale_plan(folder: Path, manifest: Mapping[str, Any], plan: Plan) -> list[str]:
    exported = {name: Plan.read(folder / variant["plan"]["file"]) for name, variant in manifest["variants"].items()}
    if any(replace(plan, name=None) == replace(other, name=None) for other in exported.values()):
        return []
    return [f"the plan differs from those of all exported variants ({', '.join(exported)})"]


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

    @property
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
    with _opened_export(folder) as (opened, manifest):
        try:
            entry = _chunks_of(manifest["variants"][variant]["ranks"][str(rank)])[chunk]
        except (KeyError, IndexError) as error:
            known = {name: sorted(v["ranks"]) for name, v in manifest["variants"].items()}
            asked = f"{variant!r} for rank {rank}" + f", chunk {chunk}" * (chunk > 0)
            raise ExportError(f"{folder} has no graph of variant {asked}\nhint: name one of {known}") from error
        module = _module(opened, manifest, entry)
        loaded = ExportedRank(rank, module, tuple(entry["slots"]), tuple(entry["results"]))
        if manifest["weights"]:
            loaded.load_weights(_Beside(opened, manifest["weights"]))
        return loaded


def _chunks_of(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a manifest says of each graph of a rank."""
    return [entry, *entry.get("chunks", [])]


def load_single(folder: str | Path, mode: str) -> nn.Module:
    """Load one of the model's own graphs ("training", "evaluation", "inference"), with its weights.

    Plain `torch.export.load(path).module()` gives the same where the weights are inside. Errors and warnings are those
    of `load_exported`.
    """
    folder = Path(folder)
    with _opened_export(folder) as (opened, manifest):
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
    for reason in _stale_torch(manifest):
        warnings.warn(f"{opened.path} is stale: {reason}", stacklevel=3)
    with opened.file(entry["file"]) as file:
        return torch.export.load(file).module()


def _stale_torch(manifest: Mapping[str, Any]) -> list[str]:
    """Say that an export was written by another minor version of torch, if it was."""
    written, here = manifest["torch"], str(torch.__version__)
    if written.split(".")[:2] == here.split(".")[:2]:
        return []
    return [f"it was written by torch {written}, this is torch {here}\nhint: export again if it does not load"]


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
def _opened_export(folder: Path) -> Iterator[tuple[OpenFolder, Mapping[str, Any]]]:
    """Give an export, open, and what it says of itself.

    Raises:
        ExportError: it is none, of another format, or damaged; or what is read of it meanwhile is.
    """
    try:
        with OpenFolder(find_folder(folder)) as opened, told_as_damaged(f"the export {folder}", ExportError):
            yield opened, _read_manifest(opened)
    except CheckpointError as error:
        raise ExportError(f"{error}\nhint: export again") from error


def _read_manifest(opened: OpenFolder) -> Mapping[str, Any]:
    if opened.manifest is None or _MANIFEST not in opened:
        raise ExportError(f"{opened.path} is no export: there is no {_MANIFEST} that {MANIFEST} names in it")
    manifest = opened.document(_MANIFEST)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ExportError(
            f"{opened.path / _MANIFEST} has format {found!r}, this version reads {FORMAT!r}"
            f"\nhint: export the model again, or load it with the version of hetu_fx that wrote it"
        )
    told: Mapping[str, Any] = manifest
    return told
