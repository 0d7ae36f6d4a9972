"""Adapters of PEFT, and trl's SFTTrainer: packed, on completions, smoothed, accumulating, in bf16, resumed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.scripts.job import Job, loss_of, whole
from tests.scripts.script import Results, script
from tests.scripts.trainers import arguments, logged, trainer
from tests.scripts.training import sgd, step

_SINGLE = 1e-5  # losses and norms are logged in single precision
VOCABULARY = 60
_LOGGED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")


_TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {% endgeneration %}\
{% else %}{{ m.content }} {% endif %}{% endfor %}"""


def tokenizer() -> Any:
    import transformers as hf
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<pad>": 0, "<eos>": 1, **{str(token): token for token in range(2, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, "<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "chat_template": _TEMPLATE}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def _talks(count: int) -> Any:
    """Return a data set of questions and answers."""
    from datasets import Dataset

    texts = [(" ".join(map(str, row[:3])), " ".join(map(str, row[3:]))) for row in _rows(count)["input_ids"]]
    roles = ("user", "assistant")
    talks = [[{"role": role, "content": text} for role, text in zip(roles, one, strict=True)] for one in texts]
    return Dataset.from_list([{"messages": talk} for talk in talks])


def _rows(count: int, **columns: Any) -> Any:
    """Return a data set of rows of unequal length, with columns that are made from a row's tokens."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(2, VOCABULARY, (5 + 3 * (i % 4),), generator=generator).tolist() for i in range(count)]
    return Dataset.from_list([{"input_ids": row, **{k: make(row) for k, make in columns.items()}} for row in rows])


def _sft(job: Job, model: nn.Module, data: Any = None, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    usual = {"max_length": 16, "bf16": False, "num_train_epochs": 1, "gradient_checkpointing": False}
    given = {**arguments(job).to_dict(), **usual, **(changes or {})}
    known = {k: value for k, value in given.items() if k in SFTConfig.__dataclass_fields__ and value is not None}
    data = _rows(16) if data is None else data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SFTTrainer(model, SFTConfig(**known), train_dataset=data, processing_class=tokenizer(), **options)


def _trained(job: Job, data: Any = None, changes: dict[str, Any] | None = None, **options: Any) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch, outputs="all")
    made = _sft(job, model, data, changes, **options)
    made.train()
    return {**logged(made, *_LOGGED), **job.parameters(model)}


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


@script("fine-tunes by trl's SFTTrainer", tolerance=_SINGLE)
def _(job: Job) -> Results:
    return _trained(job)


@script("fine-tunes by trl on packed rows (packing_strategy wrapped)", tolerance=_SINGLE)
def _(job: Job) -> Results:
    return _trained(job, _rows(32), {"packing": True, "packing_strategy": "wrapped", "max_length": 19})


# Its rows have no padding: each process has one of its own length, told to the model as a number.
@script("fine-tunes by trl on packed rows (packing_strategy bfd)", tolerance=_SINGLE, refused="static values")
def _(job: Job) -> Results:
    return _trained(job, _rows(48), {"packing": True, "max_length": 16})


@script("fine-tunes by trl on completions alone", tolerance=_SINGLE)
def _(job: Job) -> Results:
    data = _rows(16, completion_mask=lambda row: [int(i > 2) for i in range(len(row))])
    return _trained(job, data, {"completion_only_loss": True})


@script("fine-tunes by trl on what the assistant says (assistant_only_loss)", tolerance=_SINGLE)
def _(job: Job) -> Results:
    return _trained(job, _talks(16), {"assistant_only_loss": True})


@script("fine-tunes by trl with smoothed labels", tolerance=_SINGLE)
def _(job: Job) -> Results:
    return _trained(job, None, {"label_smoothing_factor": 0.1})


@script("fine-tunes by trl with the loss of dynamic fine-tuning (dft)", tolerance=_SINGLE)
def _(job: Job) -> Results:
    return _trained(job, None, {"loss_type": "dft"})


@script("fine-tunes by trl over two batches a step, with clipped gradients", tolerance=_SINGLE)
def _(job: Job) -> Results:
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4 // job.world, "max_grad_norm": 0.05}
    return _trained(job, None, changes)


@script("fine-tunes by trl in bf16", tolerance=2e-2)
def _(job: Job) -> Results:
    made = _trained(job, None, {"bf16": True})
    return {name: value for name, value in made.items() if name in ("loss", "num_tokens")}


def _pipeline(job: Job) -> dict[str, Any]:
    """Return a plan of two stages for as many ranks, with two micro-batches."""
    if job.is_plain:
        return {}
    half = job.world // 2
    stages = (Stage(tuple(range(half))), Stage(tuple(range(half, job.world))))
    return {"plan": Plan((Pipeline(stages, micro_batches=2),))}


@script("fine-tunes by trl in a pipeline, without outputs of training", tolerance=_SINGLE, settings=("tp2", "mix4"))
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch, **_pipeline(job))
    made = _sft(job, model)
    made.train()
    return {**logged(made, "loss", "grad_norm", "num_tokens"), **job.parameters(model)}


@script("fine-tunes by trl and evaluates, the last batch with fewer rows", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch, outputs="all")
    made = _sft(job, model, None, {"eval_strategy": "epoch", "num_train_epochs": 2}, eval_dataset=_rows(13))
    made.train()
    return {**logged(made, *_LOGGED, "eval_loss"), **job.parameters(model)}


@script("fine-tunes adapters of PEFT by trl, and saves them alone", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = adapted(job)
    job.parallel(model, batch, outputs="all")
    made = _sft(job, model)
    made.train()
    made.save_model(str(job.folder / "adapter"))
    job.barrier()
    names = sorted(path.name for path in (job.folder / "adapter").iterdir() if path.name.startswith("adapter"))
    return {**logged(made, *_LOGGED), "files": names, **job.parameters(model)}


@script("fine-tunes by trl with adapters that it adds itself (peft_config)", tolerance=_SINGLE)
def _(job: Job) -> Results:
    from peft import LoraConfig

    model, batch = job.llama()
    job.parallel(model, batch, outputs="all")
    made = _sft(job, model, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    made.train()
    return {**logged(made, *_LOGGED), **job.parameters(made.model)}


@script("fine-tunes by trl, saves checkpoints and resumes from one", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    changes = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(job.folder), "max_steps": 2}
    _sft(job, model, None, changes).train()
    other, _ = job.llama()
    job.parallel(other, batch)
    made = _sft(job, other, None, {**changes, "max_steps": 3})
    made.train(resume_from_checkpoint=str(job.folder / "checkpoint-1"))
    return {**logged(made, "loss", "num_tokens"), **job.parameters(other)}


@script("fine-tunes by trl with gradient checkpointing, its default", tolerance=_SINGLE)
def _(job: Job) -> Results:
    return _trained(job, None, {"gradient_checkpointing": True})


def _stepped(job: Job) -> tuple[Any, Any]:
    model, batch = adapted(job)
    job.parallel(model, batch)
    step(job, model, batch, sgd(model))
    return model, batch


@script("merges trained adapters into the weights and saves the plain model", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, _ = _stepped(job)
    merged = copy.deepcopy(model).merge_and_unload()
    return {name: whole(value) for name, value in merged.state_dict().items()}


@script("loads the adapter that it saved alone into a plain model", tolerance=_SINGLE)
def _(job: Job) -> Results:
    from peft import PeftModel

    model, batch = _stepped(job)
    if job.rank == 0:
        model.save_pretrained(job.folder / "adapter")
    job.barrier()
    plain = PeftModel.from_pretrained(job.llama()[0], str(job.folder / "adapter")).double()
    with torch.no_grad():
        return {"loss": float(loss_of(plain(**batch))), **job.parameters(plain)}


@script("has two adapters, and trains one after the other", tolerance=_SINGLE)
def _(job: Job) -> Results:
    from peft import LoraConfig

    model, batch = adapted(job)
    peft: Any = model
    peft.add_adapter("second", LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights="gaussian"))
    model.double()
    job.parallel(model, batch)
    losses = []
    for name in ("default", "second"):
        peft.set_adapter(name)
        losses += [step(job, model, batch, sgd(model)) for _ in range(2)]
    with torch.no_grad(), peft.disable_adapter():
        losses.append(float(loss_of(model(**job.rows(batch)))))
    return {"losses": losses, **job.parameters(model)}


@script("trains a module of its own beside adapters (modules_to_save)", tolerance=_SINGLE)
def _(job: Job) -> Results:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    plain, batch = job.llama()
    options = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"}
    model: Any = get_peft_model(plain, LoraConfig(modules_to_save=["lm_head"], **options)).double()
    job.parallel(model, batch)
    optimizer = sgd(model)
    losses = [step(job, model, batch, optimizer) for _ in range(2)]
    kept = get_peft_model_state_dict(model)
    return {"losses": losses, **{name: whole(value) for name, value in kept.items()}}
