"""Runs of Hugging Face's Trainer that scripts share."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from tests import model_zoo
from tests.scripts.job import Job

ROWS = 24


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens with labels, all of one length."""

    def __init__(self, rows: int = ROWS) -> None:
        torch.manual_seed(3)
        self.columns = model_zoo.causal_batch(rows, model_zoo.LENGTH)

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def arguments(job: Job, **changes: Any) -> TrainingArguments:
    """Return arguments under which 8 rows make a global batch, whatever the number of ranks."""
    given: dict[str, Any] = {
        "output_dir": str(job.folder / "run"),
        "per_device_train_batch_size": 8 // job.world,
        "per_device_eval_batch_size": 8 // job.world,
        "num_train_epochs": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 11,
    }
    return TrainingArguments(**{**given, **changes})


def trainer(job: Job, model: nn.Module, changes: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """Return a Trainer of a model that is parallel already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Trainer(model=model, args=arguments(job, **changes or {}), train_dataset=Rows(), **options)
    made.remove_callback(PrinterCallback)
    return made


def logged(made: Trainer, *names: str) -> dict[str, list[float]]:
    """Return what a Trainer has logged under the names, step by step."""
    history = made.state.log_history
    return {name: [float(entry[name]) for entry in history if name in entry] for name in names}
