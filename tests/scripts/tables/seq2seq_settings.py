"""Settings of Seq2SeqTrainer, each with evaluations and checkpoints, and resumed, in single precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from tests.scripts.entries.trainer import Pairs, seq2seq
from tests.scripts.job import Job
from tests.scripts.script import Results, script
from tests.scripts.tables.trainer_settings import BOUND, EVERY, PLANS, SINGLE, Changes, each
from tests.scripts.trainers import files, saved_weights, told


def _tokens(found: Any) -> dict[str, float]:
    """Return a number that depends on every token that was generated, and on its place."""
    tokens = np.where(found.predictions < 0, 0, found.predictions)
    return {"accuracy": float((tokens * np.arange(1, tokens.shape[1] + 1)).sum())}


def _collating(model: Any) -> Any:
    """Return a collator that gives the decoder's inputs, as DataCollatorForSeq2Seq does of a model."""

    def collate(rows: Any) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = default_collate(rows)
        return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])}

    return collate


def _trained(job: Job, model: Any, changes: Changes) -> Results:
    given, run = {**EVERY, **changes}, job.folder / "run"
    options = {"eval_dataset": Pairs(16), "data_collator": _collating(model)}
    generates = "predict_with_generate" in given
    made = seq2seq(job, model, given, **options, compute_metrics=_tokens if generates else None)
    made.train()
    found = {**told(made), "files": files(run), **saved_weights(run / "checkpoint-4")}
    if generates:
        found["predictions"] = torch.as_tensor(made.predict(Pairs(16)).predictions)
    again = seq2seq(job, model, given, **options)
    again.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    return {**found, **{f"resumed {name}": values for name, values in told(again).items()}}


def _script(name: str, settings: dict[str, Changes], tolerance: float = SINGLE, refused: str = "") -> None:
    @script(f"Seq2SeqTrainer: {name}", tolerance=tolerance, refused=refused, settings=PLANS, seconds=BOUND)
    def _(job: Job) -> Results:
        model, batch = job.zoo("t5")
        job.parallel(model.float(), batch)
        return each(job, model, settings, _trained)


_GENERATES: Changes = {"predict_with_generate": True, "generation_max_length": 6}
_script(
    "settings",
    {
        "as it comes": {},
        "gradient_accumulation_steps=2": {"gradient_accumulation_steps": 2},
        "predict_with_generate": _GENERATES,
        "predict_with_generate, by two beams": {**_GENERATES, "generation_num_beams": 2},
        "load_best_model_at_end": {"load_best_model_at_end": True, "eval_steps": 2},
    },
)
_script("bf16", {"bf16": {"bf16": True}}, tolerance=2e-2)
_SMOOTHED: Changes = {"label_smoothing_factor": 0.1, "eval_strategy": "no"}
_script("label smoothing", {"label_smoothing_factor": _SMOOTHED}, refused="loss_fn")
