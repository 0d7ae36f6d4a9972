"""Hugging Face's Trainer, as it comes, and Seq2SeqTrainer."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

from tests import model_zoo
from tests.scripts.job import Job
from tests.scripts.script import Results, script
from tests.scripts.trainers import Rows, arguments, logged, trainer

# A Trainer logs losses and norms that it has rounded, or summed in single precision.
_SINGLE = 1e-5


def _runs_with(name: str, tolerance: float = _SINGLE, **changes: Any) -> None:
    @script(f"trains by Trainer {name}", tolerance=tolerance)
    def _(job: Job) -> Results:
        model, batch = job.llama()
        job.parallel(model, batch)
        made = trainer(job, model, changes)
        made.train()
        return {**logged(made, "loss", "grad_norm", "learning_rate"), **job.parameters(model)}


_runs_with("as it comes")
_runs_with("with accumulation", gradient_accumulation_steps=2)
_runs_with("with accumulation and a part left over", gradient_accumulation_steps=2, max_steps=3)
_runs_with("with label smoothing", label_smoothing_factor=0.1)
_runs_with("with a cosine schedule and warmup", lr_scheduler_type="cosine", warmup_steps=2)
_runs_with("with Adafactor", optim="adafactor", learning_rate=1e-2)
_runs_with("with a small largest norm", max_grad_norm=0.05)
# AdamW divides by gradients, of which some are rounding of the loss in single precision and nothing else.
_runs_with("with AdamW", tolerance=1e-3, optim="adamw_torch_fused", learning_rate=1e-2)
_runs_with("with gradient checkpointing", gradient_checkpointing=True)
_runs_with("dropping the last rows", dataloader_drop_last=True)
_runs_with("with NEFTune's noise, too small to be seen", neftune_noise_alpha=1e-9)
_runs_with("without clipping", max_grad_norm=0.0)
_runs_with("with torch.compile", torch_compile=True, torch_compile_backend="eager")
_runs_with("with rows grouped by their lengths", train_sampling_strategy="group_by_length")
_runs_with("with losses averaged over devices' tokens", average_tokens_across_devices=True)
_runs_with("without averaging over devices' tokens", average_tokens_across_devices=False)
_runs_with("with the dispatcher of batches", accelerator_config={"dispatch_batches": True})
_runs_with(
    "with batches split by accelerate", accelerator_config={"split_batches": True}, per_device_train_batch_size=8
)


@script("evaluates by Trainer after each epoch", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    made = trainer(job, model, {"eval_strategy": "epoch"}, eval_dataset=Rows(16))
    made.train()
    return {**logged(made, "loss", "eval_loss"), **job.parameters(model)}


def _evaluates(rows: int, name: str, **changes: Any) -> None:
    @script(f"evaluates {rows} rows by Trainer {name}, the last batch filled up with others", tolerance=_SINGLE)
    def _(job: Job) -> Results:
        model, batch = job.llama()
        job.parallel(model, batch)
        made = trainer(job, model, changes)
        found = made.predict(Rows(rows))
        losses = [made.evaluate(Rows(rows))["eval_loss"], found.metrics["test_loss"]]
        return {"losses": losses, "logits": torch.as_tensor(found.predictions)}


_evaluates(18, "as it comes")
_evaluates(13, "without averaging over devices' tokens", average_tokens_across_devices=False)
_evaluates(11, "that dispatches batches", accelerator_config={"dispatch_batches": True})


@script("computes metrics of all rows' predictions by Trainer", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)

    def metrics(found: Any) -> dict[str, float]:
        logits, labels = found.predictions, found.label_ids
        right = (np.argmax(logits, -1) == labels)[labels != -100]
        return {"accuracy": float(right.mean()), "rows": float(len(labels)), "sum": float(np.abs(logits).sum())}

    made = trainer(job, model, eval_dataset=Rows(16), compute_metrics=metrics)
    found = made.evaluate()
    return {name: float(found[f"eval_{name}"]) for name in ("accuracy", "rows", "sum", "loss")}


@script("predicts by Trainer", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    found = trainer(job, model).predict(Rows(12))
    return {"logits": torch.as_tensor(found.predictions), "labels": torch.as_tensor(found.label_ids)}


@script("has a callback that looks at the model after each step of Trainer", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    norms: list[float] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            norms.append(float(model.lm_head.weight.detach().norm()))

    trainer(job, model, callbacks=[Look()]).train()
    return {"norms": norms}


@script("gives Trainer an optimizer and a schedule", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    made = trainer(job, model, optimizers=(optimizer, schedule))
    made.train()
    return {**logged(made, "loss", "learning_rate"), **job.parameters(model)}


@script("trains by Trainer twice, going on where it was", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    for _ in range(2):
        made = trainer(job, model, {"num_train_epochs": 1})
        made.train()
    return {**logged(made, "loss"), **job.parameters(model)}


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """Sentences of one length, and what they are translated to."""

    def __init__(self, rows: int) -> None:
        torch.manual_seed(3)
        self.columns = model_zoo.translation_batch(rows, model_zoo.LENGTH)

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def seq2seq(job: Job, model: Any, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a Seq2SeqTrainer of a model that is parallel already."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    usual = {"num_train_epochs": 1, "max_grad_norm": 0.5}
    given = {**arguments(job).to_dict(), **usual, **(changes or {})}
    fields = Seq2SeqTrainingArguments.__dataclass_fields__
    known = {name: value for name, value in given.items() if name in fields and value is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Seq2SeqTrainer(model, Seq2SeqTrainingArguments(**known), train_dataset=Pairs(24), **options)


def _translated(job: Job, changes: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Results]:
    model, batch = job.zoo("t5")
    job.parallel(model, batch)
    made = seq2seq(job, model, changes, **options)
    made.train()
    return made, {**logged(made, "loss", "grad_norm", "eval_loss"), **job.parameters(model)}


@script("translates by Seq2SeqTrainer, and evaluates the loss of a last batch with fewer rows", tolerance=_SINGLE)
def _(job: Job) -> Results:
    return _translated(job, {"eval_strategy": "epoch"}, eval_dataset=Pairs(13))[1]


@script("evaluates what Seq2SeqTrainer generates (predict_with_generate)", tolerance=_SINGLE)
def _(job: Job) -> Results:
    changes = {"predict_with_generate": True, "generation_max_length": 6, "generation_num_beams": 2}
    made, results = _translated(job, changes)
    found = made.predict(Pairs(13))
    # It drops no row that accelerate has filled up the last batch with.
    return {
        **results,
        "tokens": torch.as_tensor(found.predictions[:13]),
        "labels": torch.as_tensor(found.label_ids[:13]),
    }


@script("translates by Seq2SeqTrainer over two batches a step", tolerance=_SINGLE)
def _(job: Job) -> Results:
    return _translated(job, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4 // job.world})[1]


@script("saves checkpoints by Seq2SeqTrainer and resumes from one", tolerance=_SINGLE)
def _(job: Job) -> Results:
    changes = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(job.folder), "max_steps": 2}
    _translated(job, changes)
    model, batch = job.zoo("t5")
    job.parallel(model, batch)
    made = seq2seq(job, model, {**changes, "max_steps": 3})
    made.train(resume_from_checkpoint=str(job.folder / "checkpoint-1"))
    return {**logged(made, "loss"), **job.parameters(model)}
