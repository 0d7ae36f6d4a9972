"""Settings of Hugging Face's Trainer, each trained with evaluations and checkpoints, and resumed, in single precision.

`python -m tests.scripts --area trainer_settings --page PAGE` makes a table of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import Trainer

from tests.scripts.job import Job
from tests.scripts.script import Results, script
from tests.scripts.trainers import Rows, logged, trainer

PLANS = ("dp2", "tp2", "pp2")
_SINGLE = 1e-5
_EVERY = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2}


def _setting(name: str, tolerance: float = _SINGLE, refused: str = "", resumes: bool = True, **changes: Any) -> None:
    @script(f"Trainer: {name}", tolerance=tolerance, refused=refused, settings=PLANS, seconds=180)
    def _(job: Job) -> Results:
        made = _trainer(job, changes)
        made.train()
        found = {**_told(made), "files": _files(job.folder / "run")}
        if resumes:
            again = _trainer(job, changes)
            again.train(resume_from_checkpoint=str(job.folder / "run" / "checkpoint-2"))
            found |= {f"resumed {name}": values for name, values in _told(again).items()}
        return found


def _trainer(job: Job, changes: dict[str, Any]) -> Trainer:
    model, batch = job.llama()
    job.parallel(model.float(), batch)
    return trainer(job, model, {**_EVERY, **changes}, eval_dataset=Rows(18), compute_metrics=_accuracy)


def _accuracy(found: Any) -> dict[str, float]:
    right = np.argmax(found.predictions, -1) == found.label_ids
    return {"accuracy": float(right[found.label_ids != -100].mean())}


def _told(made: Trainer) -> dict[str, list[float]]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    found = {name: values for name, values in logged(made, *names).items() if values}
    return {**found, "steps": [float(made.state.global_step)]}


def _files(folder: Path) -> list[str]:
    """Return what was written; each process writes the state of its own random numbers."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if "rng_state" not in name)


_setting("as it comes")
_setting("accumulation", gradient_accumulation_steps=2, num_train_epochs=4)
_setting("accumulation, with steps left over", gradient_accumulation_steps=2, max_steps=5)
# What is worked out from outputs needs them on the process that has the rows, whole: a pipeline is refused.
_setting("label smoothing", refused="loss_fn", label_smoothing_factor=0.1, eval_strategy="no")
_setting("gradient checkpointing", gradient_checkpointing=True)
_setting("a cosine schedule with warmup", lr_scheduler_type="cosine", warmup_steps=2)
_setting("a constant rate with warmup", lr_scheduler_type="constant_with_warmup", warmup_steps=3)
_setting("a polynomial schedule", lr_scheduler_type="polynomial")
_setting(
    "a rate that falls where the loss stays", lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="loss"
)
_setting("SGD with weight decay", weight_decay=0.1)
# These divide by gradients, of which some are rounding and nothing else.
_setting("AdamW", tolerance=1e-4, optim="adamw_torch", learning_rate=1e-3)
_setting("fused AdamW with decay", tolerance=1e-4, optim="adamw_torch_fused", learning_rate=1e-3, weight_decay=0.1)
_setting("Adafactor", tolerance=1e-4, optim="adafactor", learning_rate=1e-3)
_setting("Adagrad", tolerance=1e-4, optim="adagrad", learning_rate=1e-3)
_setting("RMSprop", tolerance=1e-4, optim="rmsprop", learning_rate=1e-4)
_setting("a small largest norm", max_grad_norm=0.05)
_setting("no clipping", max_grad_norm=0.0)
_setting("NEFTune's noise, too small to be seen", neftune_noise_alpha=1e-9)
_setting("torch.compile", torch_compile=True, torch_compile_backend="eager")
_setting("losses not averaged over devices' tokens", average_tokens_across_devices=False)
_setting("the dispatcher of batches", accelerator_config={"dispatch_batches": True})
_setting("split batches", accelerator_config={"split_batches": True}, per_device_train_batch_size=8)
_setting("dropping the last rows", dataloader_drop_last=True)
_setting("rows grouped by their lengths", train_sampling_strategy="group_by_length")
_setting("bfloat16", tolerance=2e-2, bf16=True)
_setting("only models saved", resumes=False, save_only_model=True)
_setting("the best model at the end", load_best_model_at_end=True, eval_steps=2)
_setting("one checkpoint kept", resumes=False, save_total_limit=1)
_setting("evaluation at the start, in parts", eval_on_start=True, eval_accumulation_steps=1)
_setting("losses logged of several steps", logging_steps=2, logging_first_step=True)
