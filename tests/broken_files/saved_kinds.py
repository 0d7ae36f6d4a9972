"""What a parallel model saves and reads: checkpoints, weights of others, snapshots, exports."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor, nn

from hetu_fx.checkpoint.folders import latest
from hetu_fx.checkpoint.manifest import MANIFEST, FileEntry
from hetu_fx.checkpoint.summed_files import SummedFile, write_with_checksums
from hetu_fx.errors import CheckpointError, ExportError, HetuFxError
from hetu_fx.export.load import check_exported, load_exported, load_single
from hetu_fx.plans.plan import Plan
from tests.broken_files.children import Child
from tests.broken_files.kind import Kind, Promise
from tests.broken_files.trained import Net, Small, Trained, plain, trained

SAVED = "run[1]"
"""No name is ever a pattern."""
MEMORY = "memory[1]"
MOST_SEALED = 16 << 20
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


def _load_and_go_on(folder: Path) -> Any:
    """Load, and take a step: what is put in place must be what an optimizer can go on from."""
    run = trained()
    found = _load_all(folder)
    numbers = [*_numbers(run.optimizer.param_groups), *_numbers(list(run.optimizer.state.values()))]
    assert all(map(math.isfinite, numbers)), "a number that the optimizer goes on with is not finite"
    with suppress(ArithmeticError, ValueError):  # numbers may be any that are finite
        run.train(1)
    return found


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers of options and states; of tensors, those without dims."""
    if isinstance(value, Mapping):
        yield from _numbers(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.dim()):
        yield float(value)


def seal(folder: Path) -> None:
    """Make the sums of a checkpoint right, whatever stands in its files: what reads them then has to look itself."""
    path = folder / SAVED / MANIFEST
    if not _is_small(path):
        return
    manifest = json.loads(path.read_text())
    for name in [name for name in manifest["files"] if _is_small(folder / SAVED / name)]:
        with suppress(CheckpointError, SafetensorError):  # what cannot be read has no sums that are right
            _sum_again(folder / SAVED / name)
            manifest["files"][name] = FileEntry.of(folder / SAVED / name).told()
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def _sum_again(path: Path) -> None:
    """Make the sums of a file of tensors right, if they are not."""
    if path.suffix != ".safetensors":
        return
    try:
        SummedFile(path).check_all()
    except CheckpointError:
        with safe_open(path, "pt") as file:
            told = {key: text for key, text in (file.metadata() or {}).items() if not key.startswith("hetu_fx.sum")}
        write_with_checksums(path, load(path.read_bytes()), told)


def _is_small(path: Path) -> bool:
    """Tell whether this is a file that can be read: no device, no pipe, and not one of gigabytes."""
    return path.is_file() and path.stat().st_size < MOST_SEALED


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
        run.hetu.save(folder / SAVED / f"step-{step}", optimizer=run.optimizer, extra={"step": step, "n": number})


def _read_latest(folder: Path) -> Any:
    try:
        found = latest(folder / SAVED)
    except HetuFxError as error:
        if not (folder / SAVED).is_dir():
            raise
        raise AssertionError("latest() raises, and hides whole folders") from error
    if not (folder / SAVED).is_dir():
        raise CheckpointError(f"latest() finds {found} where there is no folder")
    assert found is not None, "latest() overlooks whole folders"
    return [trained().hetu.load(found, optimizer=trained().optimizer), trained().state]


def _write_snapshot(folder: Path, number: int) -> None:
    run = trained()
    run.train(1)
    run.hetu.save(folder / SAVED / "step-1", optimizer=run.optimizer, extra={"batch": 1, "number": number})
    snapshots = run.hetu.snapshots(run.optimizer, folder=folder / MEMORY, stopped_after=None)
    for batch in range(2 + number):
        run.train(1)
        snapshots.step({"batch": batch, "number": number})
    snapshots.wait()


def _resume(folder: Path) -> Any:
    run = trained()
    snapshots = run.hetu.snapshots(
        run.optimizer, folder=folder / MEMORY, checkpoints=folder / SAVED, stopped_after=None
    )
    found = snapshots.resume()
    return [found.source, found.step, plain(found.extra), run.state]


def _write_of_two(folder: Path, number: int) -> None:
    """Save as two ranks do, whose parts differ in size: a checkpoint, and a snapshot with copies of each other's."""
    store = folder.with_name(f"store of {number}")

    def work(rank: int) -> None:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
        run = Trained(Net, Plan.data_parallel((0, 1), (3, 1)))
        run.train(number + 1)
        run.hetu.save(folder / SAVED / "step-1", optimizer=run.optimizer, extra={"number": number})
        snapshots = run.hetu.snapshots(run.optimizer, folder=folder / MEMORY, stopped_after=None)
        for batch in range(2 + number):
            run.train(1)
            snapshots.step({"batch": batch})
        snapshots.wait()
        dist.barrier()

    for ended in [rank.wait(300.0) for rank in [Child(partial(work, rank)) for rank in range(2)]]:
        _ = ended.sound


def _load_of_two(folder: Path) -> Any:
    run = trained()
    return [run.hetu.load(folder / SAVED / "step-1", optimizer=run.optimizer), run.state]


def _exporter(**options: Any) -> Callable[[Path, int], None]:
    def write(folder: Path, number: int) -> None:
        run = trained(Small)
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
    sums = json.loads((folder / SAVED / MANIFEST).read_text())
    return [found.explain().replace(str(folder), ""), dict(found.manifest), list(found.stale), sums]


_checkpoint, _export, _export_beside = _saver(optimizer=True), _exporter(), _exporter(weights=False)

SAVED_KINDS: Mapping[str, Kind] = {
    "weights": Kind(_saver(), _load, _state),
    "weights in several files": Kind(_saver(max_shard_size=150), _load, _state),
    "checkpoint": Kind(_checkpoint, _load_all, _state),
    "checkpoint in several files": Kind(_saver(optimizer=True, max_shard_size=150), _load_all, _state),
    "checkpoint with right sums": Kind(_checkpoint, _load_and_go_on, _state, Promise.ANYTHING, seal=seal),
    "weights of others": Kind(_as_others_save(_saver()), _load, _state, Promise.ANYTHING),
    "weights of others in several files": Kind(
        _as_others_save(_saver(max_shard_size=150)), _load, _state, Promise.ANYTHING
    ),
    "latest": Kind(_write_steps, _read_latest, _state, instead=("*/step*2",)),
    "snapshot": Kind(_write_snapshot, _resume, _state, instead=("memory*/*/*",), writes=True),
    "checkpoint of two ranks": Kind(_write_of_two, _load_of_two, _state),
    "snapshot of two ranks": Kind(_write_of_two, _resume, _state, instead=("memory*/*/*",), writes=True),
    "export": Kind(_export, _read_exported),
    "export, weights beside": Kind(_export_beside, _read_exported),
    "export for one device": Kind(_export_beside, _read_single),
    "export, looked at": Kind(_export, _look_at_export, promise=Promise.ANYTHING),
}
