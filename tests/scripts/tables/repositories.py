"""Whole scripts in the style of repositories, plain and with the one line: all that they log and save is compared."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.scripts.job import Job
from tests.scripts.repositories.utils import read_log
from tests.scripts.script import Results, script
from tests.scripts.settings import USUAL

OUTSIDE = ("one", "dp2", "dp4")
"""Settings of scripts that compute the loss of outputs, or look at outputs in training."""
_ROUNDING = 1e-15
"""Less is zero: a bias of keys changes nothing, so that its gradient is what sums have been rounded by."""
SINGLE = 1e-5  # trainers log losses and norms in single precision


def _repository(
    name: str,
    module: str,
    *runs: Sequence[str],
    settings: tuple[str, ...] = OUTSIDE,
    tolerance: float = 1e-9,
) -> None:
    @script(f"Repository: {name}", settings=settings, tolerance=tolerance)
    def _(job: Job) -> Results:
        main = import_module(f"tests.scripts.repositories.{module}").main
        out = job.folder / "out"
        with _warnings() as said:
            for run in runs or [()]:
                main(["--out", str(out), *_plan(job), *run])
                job.barrier()
        return {**_logged(out), **dict(_tensors("", torch.load(out / "ckpt.pt"))), "warnings": sorted(set(said))}


def _plan(job: Job) -> list[str]:
    if job.plan is None:
        return []
    path = job.folder / f"plan-{job.rank}.json"
    job.plan.write(path)
    return ["--plan", str(path)]


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what is warned of, by warnings and in hetu_fx's logs."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.name}: {record.getMessage()}")

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("hetu_fx")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", ResourceWarning)  # sockets of the scripts before
            yield said
    finally:
        logger.removeHandler(handler)
    said += [f"{one.category.__name__}: {one.message} ({one.filename})" for one in found]


def _logged(folder: Path) -> Results:
    """Return each name's numbers or texts of a log, in their order."""
    found: dict[str, list[Any]] = {}
    for line in read_log(folder):
        for name, value in line.items():
            found.setdefault(f"log {name}", []).extend(value if isinstance(value, list) else [value])
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers of a checkpoint, named by where they stand."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _tensors(f"{name}/{key}", one)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _tensors(f"{name}/{number}", one)
    elif isinstance(value, Tensor) and value.is_floating_point():
        yield f"saved {name}", value.where(value.abs() > _ROUNDING, 0.0)
    elif isinstance(value, Tensor | int | float | str):
        yield f"saved {name}", value


_repository(
    "a GPT with accumulation, EMA, samples and a resumed checkpoint", "nanogpt", ["--max-iters", "3"],
    ["--max-iters", "6", "--resume"],
)  # fmt: skip
_repository("a ResNet with mixup", "resnet")
_repository("a ViT whose criterion is a loss_fn", "vit", settings=USUAL)
_repository("a VAE", "vae")
_repository("a DETR with Hungarian matching", "detr")
_repository("fine-tuning with LoRA", "sft_lora", settings=USUAL, tolerance=1e-6)  # transformers casts logits down
_repository("DPO by trl", "dpo", ["--epochs", "1"], tolerance=SINGLE)
_repository("Trainer with a compute_loss of its own", "own_loss", ["--epochs", "1"], tolerance=SINGLE)
_repository("a forecaster of an IterableDataset", "stream", settings=USUAL)
_repository("a DCGAN of two optimizers", "gan")
