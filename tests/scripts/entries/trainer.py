"""Hugging Face's Trainer, as it comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from tests.scripts.job import Job
from tests.scripts.script import Results, script
from tests.scripts.trainers import Rows, logged, trainer

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
