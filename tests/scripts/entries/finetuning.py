"""Adapters of PEFT."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.scripts.job import Job
from tests.scripts.script import Results, script
from tests.scripts.trainers import logged, trainer

_SINGLE = 1e-5


def adapted(job: Job) -> tuple[nn.Module, dict[str, Any]]:
    """Return a Llama with adapters, and a batch."""
    from peft import LoraConfig, get_peft_model

    model, batch = job.llama()
    targets = ["q_proj", "v_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights="gaussian"))
    return adapted.double(), batch


@script("trains adapters by Trainer, and saves them alone", tolerance=_SINGLE, seconds=120)
def _(job: Job) -> Results:
    model, batch = adapted(job)
    job.parallel(model, batch)
    made = trainer(job, model)
    made.train()
    made.save_model(str(job.folder / "adapter"))
    job.barrier()
    names = sorted(path.name for path in (job.folder / "adapter").iterdir())
    return {**logged(made, "loss", "grad_norm"), "files": names, **job.parameters(model)}
