"""Adapters of PEFT trained by Trainer: resumed, merged, saved alone, loaded again, in single precision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from tests.scripts.job import Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.tables.trainer_settings import BOUND, PLANS, SINGLE, Changes, made_by, weights
from tests.scripts.trainers import files, told

_LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}
_NO_METRICS = {"compute_metrics": None}  # PEFT's forward names no labels, so that Trainer looks for none


def _adapted(job: Job, **changes: Any) -> Any:
    """Return a parallel Llama with an adapter."""
    from peft import LoraConfig, get_peft_model

    model, batch = job.llama()
    torch.manual_seed(2)
    adapted: nn.Module = get_peft_model(model.float(), LoraConfig(**{**_LORA, **changes})).float()
    return job.parallel(adapted, batch)


def _adapter_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {f"file {name}": tensor for name, tensor in load_file(checkpoint / "adapter_model.safetensors").items()}


def _trained(job: Job, model: Any, changes: Changes) -> Results:
    run = job.folder / "run"
    made = made_by(job, model, changes, **_NO_METRICS)
    made.train()
    found = {**told(made), "files": files(run), **_adapter_of(run / "checkpoint-4")}
    again = made_by(job, model, changes, **_NO_METRICS)
    again.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    return {**found, **{f"resumed {name}": values for name, values in told(again).items()}}


def _merged(job: Job, model: Any) -> Results:
    """Return what is in the files of the plain model that the adapter is merged into."""
    from transformers import AutoModelForCausalLM

    folder, merged = job.folder / "merged", copy.deepcopy(model).merge_and_unload()
    state = weights(merged)
    if job.rank == 0:
        merged.save_pretrained(folder, state_dict=state)
    job.barrier()
    plain = AutoModelForCausalLM.from_pretrained(folder).float()
    return {"files": files(folder), **{f"file {name}": p for name, p in plain.named_parameters()}}


def _alone(job: Job, model: Any) -> Results:
    """Return what is in the files of the adapter, and the loss of a plain model that it is put on."""
    from peft import PeftModel

    folder = job.folder / "adapter"
    made_by(job, model, {}).save_model(str(folder))
    job.barrier()
    base, batch = job.llama()
    plain = PeftModel.from_pretrained(base.float(), str(folder)).eval()
    with torch.no_grad():
        loss = float(loss_of(plain(**batch)))
    return {"files": files(folder), **_adapter_of(folder), "loss": loss}


@script("PEFT: LoRA", tolerance=SINGLE, settings=PLANS, seconds=BOUND)
def _(job: Job) -> Results:
    model = _adapted(job)
    parts = {
        "LoRA, resumed": _trained(job, model, {}),
        "LoRA, merged and saved as a plain model": _merged(job, model),
        "LoRA, its adapter saved alone and put on a plain model": _alone(job, model),
    }
    return {f"{part}: {name}": value for part, found in parts.items() for name, value in found.items()}


def _other(name: str, adapter: dict[str, Any], **changes: Any) -> None:
    @script(f"PEFT: {name}", tolerance=SINGLE, settings=PLANS, seconds=BOUND)
    def _(job: Job) -> Results:
        return _trained(job, _adapted(job, **adapter), changes)


_other("LoRA of all linear layers, accumulating", {"target_modules": "all-linear"}, gradient_accumulation_steps=2)
_other("LoRA beside a whole head (modules_to_save)", {"modules_to_save": ["lm_head"]})
_other("LoRA with gradient checkpointing", {}, gradient_checkpointing=True)
