"""Generation and evaluation: what scripts do with a model between its training steps."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tests.scripts.job import Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.settings import SEVERAL

NEW = 5


def prompts(job: Job, batch: dict[str, Tensor], length: int = 4) -> dict[str, Tensor]:
    """Return this rank's prompts: no token of them is padding."""
    ids = job.rows(batch)["input_ids"][:, :length] % 89 + 3
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generated(job: Job, model: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    """Return what all ranks generate from their prompts, in rank order."""
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    return job.gathered(model.generate(**given, **options))


def trained(job: Job, model: nn.Module, batch: dict[str, Tensor], steps: int = 1) -> torch.optim.Optimizer:
    """Train for some steps, so that parameters are not what they were at the call."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss_of(model(**job.rows(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@script("generates greedily in eval between training steps", tolerance=1e-6)
def _(job: Job) -> Results:
    model, batch = job.llama()
    model = job.parallel(model, batch)
    optimizer = trained(job, model, batch)
    model.eval()
    first = generated(job, model, prompts(job, batch))
    model.train()
    loss_of(model(**job.rows(batch))).backward()
    optimizer.step()
    model.eval()
    return {"first": first, "second": generated(job, model, prompts(job, batch)), **job.parameters(model)}


@script("generates from prompts of different lengths per rank")
def _(job: Job) -> Results:
    model, batch = job.llama()
    model = job.parallel(model, batch).eval()
    alone = Job(None, 0, 1, job.folder)
    mine = {
        length: generated(alone, model, prompts(alone, batch, length))
        for number, length in enumerate((3, 4, 5, 6))
        if number % job.world == job.rank
    }
    found = {length: tokens for part in job.everyones(mine) for length, tokens in part.items()}
    return {f"of {length} tokens": found[length] for length in sorted(found)}


@script("generates with beam search")
def _(job: Job) -> Results:
    model, batch = job.llama()
    model = job.parallel(model, batch).eval()
    return {"tokens": generated(job, model, prompts(job, batch), num_beams=3)}


@script("samples with a seed")
def _(job: Job) -> Results:
    model, batch = job.llama()
    model = job.parallel(model, batch).eval()
    everything = prompts(Job(None, 0, 1, job.folder), batch)
    torch.manual_seed(3)
    tokens = model.generate(**everything, max_new_tokens=NEW, do_sample=True, pad_token_id=0, eos_token_id=None)
    return {"tokens": tokens}


@script("generates with a T5 in eval")
def _(job: Job) -> Results:
    model, batch = job.zoo("t5")
    model = job.parallel(model, batch)
    trained(job, model, batch)
    model.eval()
    return {"tokens": generated(job, model, prompts(job, batch))}


@script("generates on rank 0 alone inside whole()", settings=SEVERAL)
def _(job: Job) -> Results:
    model, batch = job.llama()
    model = job.parallel(model, batch).eval()
    if job.is_plain:
        return {"tokens": generated(job, model, prompts(job, batch))[:2]}
    everything = Job(None, 0, 1, job.folder)
    tokens = None
    with model.hetu.whole():
        if job.rank == 0:
            tokens = generated(everything, model, prompts(everything, batch))[:2]
    return {"tokens": job.everyones(tokens)[0]}


@script("writes a greedy loop with a cache by hand inside whole()")
def _(job: Job) -> Results:
    model, batch = job.llama()
    model = job.parallel(model, batch).eval()
    given = prompts(job, batch)["input_ids"]
    if job.is_plain:
        return {"tokens": job.gathered(by_hand(model, given))}
    with model.hetu.whole():
        tokens = by_hand(model, given)
    return {"tokens": job.gathered(tokens)}


@torch.no_grad()
def by_hand(model: nn.Module, ids: Tensor) -> Tensor:
    """Generate greedily with the cache that the model returns."""
    output = model(ids, use_cache=True)
    for _ in range(NEW):
        token = output.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, token], 1)
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
    return ids


@script("writes a greedy loop with a cache by hand", refused="whole()")
def _(job: Job) -> Results:
    model, batch = job.llama()
    model = job.parallel(model, batch).eval()
    return {"tokens": by_hand(model, prompts(job, batch)["input_ids"])}


@script("writes a greedy loop without a cache by hand")
@torch.no_grad()
def _(job: Job) -> Results:
    model, batch = job.llama()
    model = job.parallel(model, batch).eval()
    ids = prompts(job, batch)["input_ids"]
    for _ in range(NEW):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return {"tokens": job.gathered(ids)}


@script("hands a cache object to the model", refused="whole()")
@torch.no_grad()
def _(job: Job) -> Results:
    from transformers import DynamicCache

    model, batch = job.llama()
    model = job.parallel(model, batch).eval()
    cache = DynamicCache(config=model.config)
    return {"logits": model(prompts(job, batch)["input_ids"], past_key_values=cache).logits}


@script("keeps the signature of generate")
def _(job: Job) -> Results:
    model, batch = job.llama()
    model = job.parallel(model, batch)
    return {"signature": str(inspect.signature(model.generate)), "name": model.generate.__name__}


@script("looks at a hidden layer by a hook inside whole()")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model = job.parallel(model, batch)
    trained(job, model, batch)
    seen: list[Tensor] = []
    hook = model.middle.register_forward_hook(lambda module, given, made: seen.append(made.detach()))
    mine = job.rows(batch)
    with torch.no_grad():
        if job.is_plain:
            model(**mine)
        else:
            with model.hetu.whole():
                model(**mine)
    hook.remove()
    loss = loss_of(model(**mine))
    return {"hidden": job.gathered(seen[0]), "loss": loss}


@script("takes gradients of inputs inside whole()")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model = job.parallel(model, batch).eval()
    x = job.rows(batch)["x"].clone().requires_grad_()

    def saliency() -> Tensor:
        return torch.autograd.grad(model(x)["logits"].square().sum(), x)[0]

    if job.is_plain:
        return {"gradient": job.gathered(saliency())}
    with model.hetu.whole():
        return {"gradient": job.gathered(saliency())}


@script("trains inside whole()", refused="a backward reached the parameters", settings=SEVERAL)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model = job.parallel(model, batch)
    with model.hetu.whole():
        loss_of(model(**job.rows(batch))).backward()
    return {}


@script("writes to a parameter inside whole()", refused="outside of it", settings=SEVERAL)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model = job.parallel(model, batch)
    with model.hetu.whole(), torch.no_grad():
        model.last.weight.mul_(2)
    return {}


@script("runs a batch norm in training mode inside whole()", refused="model.eval()", settings=SEVERAL)
def _(job: Job) -> Results:
    model, batch = job.conv()
    model = job.parallel(model, batch)
    with model.hetu.whole(), torch.no_grad():
        model(**job.rows(batch))
    return {}


@script("evaluates a batch norm inside whole() and trains on")
def _(job: Job) -> Results:
    model, batch = job.conv()
    model = job.parallel(model, batch)
    trained(job, model, batch)
    model.eval()
    mine = job.rows(batch)
    with torch.no_grad():
        if job.is_plain:
            found = model(**mine)
        else:
            with model.hetu.whole():
                found = model(**mine)
    model.train()
    trained(job, model, batch)
    return {"logits": job.gathered(found["logits"]), **job.parameters(model), **job.buffers(model)}


@script("saves by save_pretrained inside whole()", tolerance=1e-6)
def _(job: Job) -> Results:
    model, batch = job.llama()
    model = job.parallel(model, batch)
    trained(job, model, batch)
    folder = job.folder / "saved"
    if job.is_plain:
        model.save_pretrained(folder)
    else:
        with model.hetu.whole():
            if job.rank == 0:
                model.save_pretrained(folder)
    job.barrier()
    loaded = type(model).from_pretrained(folder, dtype=torch.float64)
    return {name: parameter.detach() for name, parameter in loaded.named_parameters()}
