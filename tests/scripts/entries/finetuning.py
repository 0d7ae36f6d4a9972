"""Trainers that stand on Hugging Face's: trl's SFTTrainer, adapters of PEFT."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from tests.scripts.entries.collators import tokenizer
from tests.scripts.job import Job
from tests.scripts.script import Results, script
from tests.scripts.trainers import Rows, arguments, logged, trainer

_SINGLE = 1e-5


def _lora(job: Job) -> tuple[nn.Module, dict[str, Any]]:
    from peft import LoraConfig, get_peft_model

    model, batch = job.llama()
    targets = ["q_proj", "v_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights="gaussian"))
    return adapted.double(), batch


def _texts() -> Any:
    from datasets import Dataset

    columns = Rows(16).columns
    return Dataset.from_list(
        [{"input_ids": row[: 5 + index % 4].tolist()} for index, row in enumerate(columns["input_ids"])]
    )


def _sft(job: Job, model: nn.Module, **changes: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    given = {**arguments(job).to_dict(), "max_length": 16, "bf16": False, "num_train_epochs": 1, **changes}
    known = {
        name: value for name, value in given.items() if name in SFTConfig.__dataclass_fields__ and value is not None
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SFTTrainer(model, SFTConfig(**known), train_dataset=_texts(), processing_class=tokenizer())


# It puts a forward of its own in the model's place, which scores tokens in pieces by an autograd function of its own.
@script("trains by trl's SFTTrainer", refused="stands in the parallel model's 'forward'", seconds=120)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    made = _sft(job, model)
    made.train()
    return {**logged(made, "loss", "grad_norm"), **job.parameters(model)}


@script("trains adapters by Trainer, and saves them alone", tolerance=_SINGLE, seconds=120)
def _(job: Job) -> Results:
    model, batch = _lora(job)
    job.parallel(model, batch)
    made = trainer(job, model)
    made.train()
    made.save_model(str(job.folder / "adapter"))
    job.barrier()
    names = sorted(path.name for path in (job.folder / "adapter").iterdir())
    return {**logged(made, "loss", "grad_norm"), "files": names, **job.parameters(model)}
