"""Runs of Hugging Face's Trainer that scripts share."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.rnn import pad_sequence
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


class Uneven(Rows):
    """The same, cut to unequal lengths."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = model_zoo.LENGTH - 2 * (index % 4)
        return {name: value[:length] for name, value in super().__getitem__(index).items()}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of rows, as long as the longest of them."""
    tokens, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    padded_labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(tokens, batch_first=True), "attention_mask": mask, "labels": padded_labels}


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
        made = Trainer(model=model, args=arguments(job, **changes or {}), **{"train_dataset": Rows(), **options})
    made.remove_callback(PrinterCallback)
    return made


def logged(made: Trainer, *names: str) -> dict[str, list[float]]:
    """Return what a Trainer has logged under the names, step by step."""
    history = made.state.log_history
    return {name: [float(entry[name]) for entry in history if name in entry] for name in names}


def told(made: Trainer) -> dict[str, list[float]]:
    """Return all that a Trainer has logged, and how many steps it has made."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    found = {name: values for name, values in logged(made, *names).items() if values}
    return {**found, "steps": [float(made.state.global_step)]}


def accuracy(found: Any) -> dict[str, float]:
    """Return which part of the tokens is predicted right."""
    right = np.argmax(found.predictions, -1) == found.label_ids
    return {"accuracy": float(right[found.label_ids != -100].mean())}


def files(folder: Path) -> list[str]:
    """Return what was written; each process writes the state of its own random numbers."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if "rng_state" not in name)


def saved_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint, as safetensors reads them."""
    return {f"file {name}": tensor for name, tensor in load_file(checkpoint / "model.safetensors").items()}
