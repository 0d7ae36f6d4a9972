"""Tell what is in an export, whether its files are as they were written, and whether it is stale."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from hetu_fx.checkpoint.open_folder import OpenFolder
from hetu_fx.errors import CheckpointError
from hetu_fx.export.load import chunks_of, opened_export, stale_torch
from hetu_fx.plans.plan import Plan

_MOST_TOLD = 5


@dataclass(frozen=True)
class Exported:
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
                for one in chunks_of(entry):
                    yield f"    rank {rank}: {one['file']}  pipeline {one['pipeline']}, stage {one['stage']}"
        yield "  weights: " + ("beside the graphs" if self.manifest["weights"] else "inside the graphs")
        yield from (f"damaged: {reason}" for reason in self.damaged)
        yield from (f"stale: {reason}" for reason in self.stale)


def check_exported(folder: str | Path, *, model: nn.Module | None = None, plan: Plan | None = None) -> Exported:
    """Look at an export: its files' sums, the version of torch, and what is given of the present.

    Args:
        folder: that `model.hetu.export` wrote.
        model: the model as it is now, plain or parallel; its values play no part, it may be on the meta device.
        plan: the plan that is to run now.

    Raises:
        ExportError: the folder is no export, or of another format.
    """
    folder = Path(folder)
    with opened_export(folder) as (opened, manifest):
        stale = stale_torch(manifest)
        if model is not None:
            stale += _stale_model(manifest["model"], model_facts(model))
        if plan is not None:
            stale += _stale_plan(folder, manifest, plan)
        return Exported(folder, manifest, tuple(_damaged(opened)), tuple(stale))


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
