"""trl's trainers on preferences and rewards: DPO, ORPO, a reward model, GRPO."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from tests.scripts.entries.finetuning import VOCABULARY, adapted, tokenizer
from tests.scripts.job import Job
from tests.scripts.script import Results, script
from tests.scripts.trainers import arguments, logged

_SINGLE = 1e-5  # losses and norms are logged in single precision


def _pairs(count: int, spread: int) -> Any:
    """Return a data set of prompts, each with a worse answer and a better one, of so many lengths."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(5)

    def words(length: int) -> str:
        return " ".join(map(str, torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()))

    rows = [{"prompt": words(3), "chosen": words(4 + i % spread), "rejected": words(5)} for i in range(count)]
    return Dataset.from_list(rows)


def _trained(
    job: Job, kind: str, module: str, model: nn.Module, *names: str, spread: int = 3, **options: Any
) -> Results:
    """Train by one of trl's trainers, for two steps of 8 pairs."""
    import importlib

    found = importlib.import_module(module)
    config = getattr(found, f"{kind}Config")
    usual = {"bf16": False, "max_steps": 2, "gradient_checkpointing": False, **options.pop("changes", {})}
    given = {**arguments(job).to_dict(), **usual}
    known = {k: value for k, value in given.items() if k in config.__dataclass_fields__ and value is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = getattr(found, f"{kind}Trainer")
        made = make(
            model, args=config(**known), train_dataset=_pairs(16, spread), processing_class=tokenizer(), **options
        )
    made.train()
    return {**logged(made, *names), **job.parameters(model)}


def _scored(job: Job) -> tuple[nn.Module, nn.Module]:
    """Return a model whose logits are asked for, and a copy of it that is not parallel."""
    model, batch = job.llama()
    plain = copy.deepcopy(model)
    tokens = batch["input_ids"]
    job.parallel(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, outputs="all")
    return model, plain


@script("learns preferences by trl's DPOTrainer", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, reference = _scored(job)
    return _trained(job, "DPO", "trl", model, "loss", "grad_norm", ref_model=reference)


# trl puts its head in the model inside of PEFT's, where it is a part of what is captured.
@script("learns preferences by trl's DPOTrainer with adapters of PEFT", tolerance=_SINGLE, refused="autograd function")
def _(job: Job) -> Results:
    model, batch = adapted(job)
    tokens = batch["input_ids"]
    job.parallel(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, outputs="all")
    return _trained(job, "DPO", "trl", model, "loss", "grad_norm")


@script("learns preferences by trl's ORPOTrainer", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch, outputs="all")
    changes = {"max_length": 16}
    # Its loss is the mean over a process's own tokens: answers of one length make it the mean over all.
    return _trained(job, "ORPO", "trl.experimental.orpo", model, "loss", "grad_norm", spread=1, changes=changes)


@script("learns what a reward is by trl's RewardTrainer", tolerance=_SINGLE)
def _(job: Job) -> Results:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY + 2, num_labels=1, pad_token_id=0, **shape)
    model = LlamaForSequenceClassification(config).double()
    tokens = torch.randint(2, VOCABULARY, (8, 9))
    job.parallel(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, outputs="all")
    return _trained(job, "Reward", "trl", model, "loss", "grad_norm")


# What is drawn depends on the number of processes, as it does without hetu_fx.
@script("draws answers and learns by their rewards by trl's GRPOTrainer", tolerance=_SINGLE, settings=("one",))
def _(job: Job) -> Results:
    model, _ = _scored(job)

    def different_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    changes = {"max_completion_length": 5, "num_generations": 4}
    return _trained(job, "GRPO", "trl", model, "grad_norm", "reward", changes=changes, reward_funcs=different_words)
