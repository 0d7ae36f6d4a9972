"""Settings of Hugging Face's Trainer, each trained with evaluations and checkpoints, and resumed, in single precision.

docs/trainer.md says how the table of them is made. A script is one parallel model, trained by a Trainer for each
setting, from the same weights: to capture a model is dearer than to train it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import Trainer

from hetu_fx.plans.plan import Plan
from tests.scripts.job import Job, whole
from tests.scripts.script import Results, script
from tests.scripts.trainers import Rows, Uneven, accuracy, files, padded, saved_weights, told, trainer

PLANS = ("dp2", "tp2", "pp2")
SINGLE = 1e-5
# Some optimizers divide by gradients, of which some are rounding and nothing else.
DIVIDED = 1e-4
DOUBLE = 1e-10
BOUND = 400.0
EVERY: dict[str, Any] = {
    "max_steps": 4, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2,
}  # fmt: skip

Changes = dict[str, Any]
Train = Callable[[Job, Any, Changes], Results]


def made_by(job: Job, model: Any, changes: Changes, **options: Any) -> Trainer:
    """Return a Trainer that evaluates and saves every few steps."""
    given = {"eval_dataset": Rows(10), "compute_metrics": accuracy, **options}
    return trainer(job, model, {**EVERY, **changes}, **given)


def parallel_llama(job: Job) -> Any:
    """Return a parallel Llama in single precision."""
    model, batch = job.llama()
    return job.parallel(model.float(), batch)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model, whole."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def once(job: Job, model: Any, changes: Changes, **options: Any) -> Results:
    """Train."""
    run = job.folder / "run"
    made = made_by(job, model, changes, **options)
    made.train()
    return {**told(made), "files": files(run), **saved_weights(run / f"checkpoint-{made.state.global_step}")}


def trained(job: Job, model: Any, changes: Changes, **options: Any) -> Results:
    """Train, and go on from the first checkpoint, by another Trainer."""
    run = job.folder / "run"
    found = once(job, model, changes, **options)
    if (run / "checkpoint-2").exists():
        again = made_by(job, model, changes, **options)
        again.train(resume_from_checkpoint=str(run / "checkpoint-2"))
        found |= {f"resumed {name}": values for name, values in told(again).items()}
    return found


def each(job: Job, model: Any, settings: Mapping[str, Changes], train: Train = trained) -> Results:
    """Train a model in each setting, from the same weights, in folders of their own."""
    start, found = weights(model), dict[str, Any]()
    for number, (name, changes) in enumerate(settings.items()):
        model.load_state_dict(start)
        made = train(replace(job, folder=job.folder / str(number)), model, changes)
        found |= {f"{name}: {result}": value for result, value in made.items()}
    return found


def _script(
    name: str, settings: Mapping[str, Changes], tolerance: float = SINGLE, refused: str = "", train: Train = trained
) -> None:
    @script(f"Trainer: {name}", tolerance=tolerance, refused=refused, settings=PLANS, seconds=BOUND)
    def _(job: Job) -> Results:
        return each(job, parallel_llama(job), settings, train)


_script(
    "settings of steps",
    {
        "as it comes": {},
        "gradient_accumulation_steps=3": {"gradient_accumulation_steps": 3},
        "accumulation, a part of a step left over": {"gradient_accumulation_steps": 2},
        "average_tokens_across_devices=True": {"average_tokens_across_devices": True},
        "average_tokens_across_devices=False": {"average_tokens_across_devices": False},
        # accelerate leaves fp16 out on CPUs, in silence: it trains in single precision, and so does a parallel model.
        "fp16, which is single precision on CPUs": {"fp16": True},
    },
)
_script(
    "settings of rates",
    {
        "a cosine schedule with warmup, and weight decay": {
            "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1,
        },
        "a polynomial schedule": {"lr_scheduler_type": "polynomial", "warmup_steps": 1},
        "a constant rate with warmup": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
        "a rate that falls where the loss stays": {
            "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss",
        },
        "a small largest norm": {"max_grad_norm": 0.05},
        "no clipping": {"max_grad_norm": 0.0},
    },
)  # fmt: skip
_script(
    "settings of batches",
    {
        # Trainer counts the loss of a split batch for as many rows as a whole one has, wherever processes split them.
        "split batches": {
            "accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 8, "eval_strategy": "no",
        },
        "dropping the last rows": {"dataloader_drop_last": True},
    },
)  # fmt: skip
# Several processes that go on from a checkpoint skip other batches than one does, under DistributedDataParallel too.
_script(
    "the dispatcher of batches", {"dispatch_batches": {"accelerator_config": {"dispatch_batches": True}}}, train=once
)
_script(
    "settings of files and logs",
    {
        "save_only_model": {"save_only_model": True},
        "load_best_model_at_end": {"load_best_model_at_end": True, "eval_steps": 2},
        "save_total_limit=1": {"save_total_limit": 1},
        "evaluation at the start, in parts": {"eval_on_start": True, "eval_accumulation_steps": 1},
        "losses logged of several steps": {"logging_steps": 2, "logging_first_step": True},
    },
)


def _with(optimizer: str) -> Changes:
    return {"optim": optimizer, "learning_rate": 1e-4}


_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop")
_script(
    "optimizers that need no other package (sgd above)",
    {f"optim={name}": _with(name) for name in _OPTIMIZERS},
    tolerance=DIVIDED,
)


@script("Trainer: optimizers that divide, in double precision", tolerance=DOUBLE, settings=PLANS, seconds=BOUND)
def _(job: Job) -> Results:
    # transformers' losses say .float(), whatever the dtype is, which would round here what must not be rounded.
    with patch.object(torch.Tensor, "float", torch.Tensor.double):
        model, batch = job.llama()
        chosen = {f"optim={name}, in double precision": _with(name) for name in ("adamw_torch", "rmsprop")}
        return each(job, job.parallel(model, batch), chosen)


_script("gradient checkpointing", {"gradient_checkpointing": {"gradient_checkpointing": True}})
_script("torch.compile", {"torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"}})
_script("bf16", {"bf16": {"bf16": True}}, tolerance=2e-2)
# What is worked out from outputs needs them on the process that has the rows, whole: a pipeline is refused.
_SMOOTHED: Changes = {"label_smoothing_factor": 0.1, "eval_strategy": "no"}
_script("label smoothing", {"label_smoothing_factor": _SMOOTHED}, refused="loss_fn")


@script("Trainer: NEFTune", tolerance=SINGLE, settings=PLANS, seconds=BOUND)
def _(job: Job) -> Results:
    # The noise is that of one device under every plan, and another than torch's own: so hetu_fx is on both sides.
    model = parallel_llama(replace(job, plan=job.plan or Plan.single(0)))
    return each(job, model, {"neftune_noise_alpha=5, held against hetu_fx on one device": {"neftune_noise_alpha": 5.0}})


@script("Trainer: rows of unequal lengths", tolerance=SINGLE, settings=PLANS, seconds=BOUND)
def _(job: Job) -> Results:
    settings: dict[str, Changes] = {
        "a collator that pads to its own longest": {},
        "rows grouped by their lengths": {"train_sampling_strategy": "group_by_length"},
    }
    data = {"train_dataset": Uneven(), "eval_dataset": Uneven(10), "data_collator": padded}
    return each(job, parallel_llama(job), settings, partial(trained, **data))


@script("Trainer: predictions", tolerance=SINGLE, settings=PLANS, seconds=BOUND)
def _(job: Job) -> Results:
    model = parallel_llama(job)
    made = made_by(job, model, {"max_steps": 2})
    made.train()
    found = made.predict(Rows(11))
    metrics = [found.metrics["test_loss"], found.metrics["test_accuracy"]]
    told = {"predictions": torch.as_tensor(found.predictions), "labels": found.label_ids.tolist(), "metrics": metrics}
    return {f"predict, the last batch not full: {name}": value for name, value in told.items()}


@script("Trainer: evaluation in low precision", tolerance=2e-2, settings=PLANS, seconds=BOUND)
def _(job: Job) -> Results:
    found = dict[str, Any]()
    for kind in ("fp16", "bf16"):
        told = made_by(job, parallel_llama(job), {f"{kind}_full_eval": True}).evaluate()
        found |= {f"{kind}_full_eval: {name}": told[name] for name in ("eval_loss", "eval_accuracy")}
    return found
