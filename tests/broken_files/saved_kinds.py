"""What a parallel model saves and reads: checkpoints, weights of others, snapshots, exports."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hetu_fx.checkpoint.folders import latest
from hetu_fx.errors import ExportError, HetuFxError
from hetu_fx.export.check import check_exported
from hetu_fx.export.load import load_exported, load_single
from tests.broken_files.kind import Kind, Promise
from tests.broken_files.trained import plain, trained

SAVED = "run[1]"
"""No name is ever a pattern."""
EXTRA = {"batch": 7, "schedule": {"rates": [0.5, 0.25], "name": "step"}, "is_last": False}


def _state() -> Any:
    return trained().state


def _saver(*, optimizer: bool = False, **options: Any) -> Callable[[Path, int], None]:
    def write(folder: Path, number: int) -> None:
        run = trained()
        run.train(number + 1)
        state = {"optimizer": run.optimizer, "extra": {**EXTRA, "number": number}} if optimizer else {}
        run.hetu.save(folder / SAVED, **state, **options)

    return write


def _load(folder: Path) -> Any:
    return [trained().hetu.load(folder / SAVED), trained().state]


def _load_all(folder: Path) -> Any:
    return [trained().hetu.load(folder / SAVED, optimizer=trained().optimizer), trained().state]


def _as_others_save(write: Callable[[Path, int], None]) -> Callable[[Path, int], None]:
    """Return what writes the same without what we add, as `save_pretrained` does."""

    def bare(folder: Path, number: int) -> None:
        write(folder / "full", number)
        (folder / SAVED).mkdir()
        for path in (folder / "full" / SAVED).glob("model*"):
            path.rename(folder / SAVED / path.name)
        shutil.rmtree(folder / "full")

    return bare


def _write_steps(folder: Path, number: int) -> None:
    run = trained()
    for step in (1, 2):
        run.train(1 + number)
        run.hetu.save(folder / SAVED / f"step[a]-{step}", optimizer=run.optimizer, extra={"step": step, "n": number})


def _read_latest(folder: Path) -> Any:
    try:
        found = latest(folder / SAVED)
    except HetuFxError as error:
        raise AssertionError("latest() raises, and hides whole folders") from error
    assert found is not None, "latest() overlooks whole folders"
    return [trained().hetu.load(found, optimizer=trained().optimizer), trained().state]


def _write_snapshot(folder: Path, number: int) -> None:
    run = trained()
    run.train(1)
    run.hetu.save(folder / "checkpoints" / "step-1", optimizer=run.optimizer, extra={"batch": 1, "number": number})
    snapshots = run.hetu.snapshots(run.optimizer, folder=folder / SAVED, stopped_after=None)
    for batch in range(2 + number):
        run.train(1)
        snapshots.step({"batch": batch, "number": number})
    snapshots.wait()


def _resume(folder: Path) -> Any:
    run = trained()
    snapshots = run.hetu.snapshots(
        run.optimizer, folder=folder / SAVED, checkpoints=folder / "checkpoints", stopped_after=None
    )
    found = snapshots.resume()
    return [found.source, found.step, plain(found.extra), run.state]


def _exporter(**options: Any) -> Callable[[Path, int], None]:
    def write(folder: Path, number: int) -> None:
        run = trained()
        run.train(1 + number)
        run.hetu.export(folder / SAVED, **options)

    return write


def _told(module: nn.Module) -> Any:
    code = getattr(module, "code", "")
    return [code, plain(module.state_dict())]


def _read_exported(folder: Path) -> Any:
    found = load_exported(folder / SAVED, "alone", 0)
    return [_told(found.module), list(found.needs), plain(found.slots), plain(found.results)]


def _read_single(folder: Path) -> Any:
    return [_told(load_single(folder / SAVED, mode)) for mode in ("training", "evaluation")]


def _look_at_export(folder: Path) -> Any:
    found = check_exported(folder / SAVED)
    if found.damaged:
        raise ExportError("; ".join(found.damaged))
    return [found.explain(), found.to_json()]


_export, _export_beside = _exporter(), _exporter(weights=False)

SAVED_KINDS: Mapping[str, Kind] = {
    "weights": Kind(_saver(), _load, _state),
    "weights in several files": Kind(_saver(max_shard_size=150), _load, _state),
    "checkpoint": Kind(_saver(optimizer=True), _load_all, _state),
    "checkpoint in several files": Kind(_saver(optimizer=True, max_shard_size=150), _load_all, _state),
    "weights of others": Kind(_as_others_save(_saver()), _load, _state, Promise.ANYTHING),
    "weights of others in several files": Kind(
        _as_others_save(_saver(max_shard_size=150)), _load, _state, Promise.ANYTHING
    ),
    "latest": Kind(_write_steps, _read_latest, _state, instead=("*/step*2",)),
    "snapshot": Kind(_write_snapshot, _resume, _state, instead=(f"{SAVED.replace('[', '[[]')}/*/*",), writes=True),
    "export": Kind(_export, _read_exported),
    "export, weights beside": Kind(_export_beside, _read_exported),
    "export for one device": Kind(_export_beside, _read_single),
    "export, looked at": Kind(_export, _look_at_export, promise=Promise.ANYTHING),
}
