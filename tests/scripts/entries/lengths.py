"""Sequences of unequal lengths per rank: what collators make that pad to their own longest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.scripts.job import Job, loss_of
from tests.scripts.script import Results, script

ROWS = 8
CAST = 1e-6  # transformers computes losses in float32
VOCABULARY = 97
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 112}


def sentences(seed: int = 0, rows: int = ROWS) -> list[list[int]]:
    """Return token ids of unequal lengths, the longest among the first, without the token of padding."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = [11, 5, 9, 7, 4, 6, 3, 5][:rows]
    return [torch.randint(1, VOCABULARY, (length,), generator=drawn).tolist() for length in lengths]


def padded(rows: list[list[int]], value: int = 0, *, left: bool = False) -> Tensor:
    """Return rows as a tensor, padded to the longest of them."""
    width = max(map(len, rows))
    fill = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([f + row if left else row + f for row, f in zip(rows, fill, strict=True)])


def mine(job: Job, rows: list[Any]) -> list[Any]:
    """Return this rank's rows."""
    each = len(rows) // job.world
    return rows[job.rank * each : (job.rank + 1) * each]


def causal(job: Job, rows: list[list[int]], *, mask: bool = True, left: bool = False) -> dict[str, Tensor]:
    """Return what a collator of language modelling makes of this rank's rows."""
    own = mine(job, rows)
    batch = {"input_ids": padded(own, left=left), "labels": padded(own, -100, left=left)}
    if mask:
        batch["attention_mask"] = padded([[1] * len(row) for row in own], left=left)
    return batch


def classified(job: Job, rows: list[list[int]], classes: int = 2) -> dict[str, Tensor]:
    """Return what a collator makes of this rank's rows for a classifier of sequences."""
    own = mine(job, list(zip(rows, [i % classes for i in range(len(rows))], strict=True)))
    return {
        "input_ids": padded([row for row, _ in own]),
        "attention_mask": padded([[1] * len(row) for row, _ in own]),
        "labels": torch.tensor([label for _, label in own]),
    }


def trained(job: Job, model: nn.Module, batches: list[dict[str, Tensor]]) -> Results:
    """Train a step on each batch; return losses and parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    # The gradient of a key's bias is zero but for rounding: softmax does not see it.
    seen = {
        name: value for name, value in job.parameters(model).items() if not name.endswith(("key.bias", "k_proj.bias"))
    }
    return {"losses": torch.stack(losses), **seen}


def made(build: Any) -> Any:
    torch.manual_seed(0)
    return build().double().train()


@script("trains a causal model with masks on unequal lengths", tolerance=CAST)
def _(job: Job) -> Results:
    model, _ = job.llama()
    batches = [causal(job, sentences(seed)) for seed in range(3)]
    return trained(job, job.parallel(model, batches[0]), batches)


@script("trains a causal model without masks on unequal lengths", tolerance=CAST)
def _(job: Job) -> Results:
    model, _ = job.llama()
    batches = [causal(job, sentences(seed), mask=False) for seed in range(2)]
    return trained(job, job.parallel(model, batches[0]), batches)


@script("trains a causal model padded on the left", tolerance=CAST)
def _(job: Job) -> Results:
    model, _ = job.llama()
    batches = [causal(job, sentences(), left=True)]
    for batch in batches:  # the padding must not predict a row's first token: a row without padding would lack it
        batch["labels"][batch["attention_mask"].cumsum(1) == 1] = -100
    return trained(job, job.parallel(model, batches[0]), batches)


@script("trains a masked language model on unequal lengths", tolerance=CAST)
def _(job: Job) -> Results:
    model, _ = job.zoo("bert")
    batches = [causal(job, sentences(seed)) for seed in range(2)]
    return trained(job, job.parallel(model, batches[0]), batches)


@script("trains a bidirectional model without a mask", refused="attention_mask", settings=("dp2", "tp2", "dp4", "mix4"))
def _(job: Job) -> Results:
    model, _ = job.zoo("bert")
    batches = [causal(job, sentences(), mask=False)]
    return trained(job, job.parallel(model, batches[0]), batches)


@script("trains a classifier of sequences on unequal lengths", tolerance=CAST)
def _(job: Job) -> Results:
    import transformers as hf

    config = hf.BertConfig(
        **SIZES, vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2
    )
    model = made(lambda: hf.BertForSequenceClassification(config))
    batches = [classified(job, sentences(seed)) for seed in range(2)]
    return trained(job, job.parallel(model, batches[0]), batches)


@script("trains a classifier that reads the last token before the padding", tolerance=CAST)
def _(job: Job) -> Results:
    import transformers as hf

    config = hf.LlamaConfig(**SIZES, vocab_size=VOCABULARY, pad_token_id=0, num_labels=2)
    model = made(lambda: hf.LlamaForSequenceClassification(config))
    batches = [classified(job, sentences())]
    return trained(job, job.parallel(model, batches[0]), batches)


@script("trains an encoder-decoder on unequal sources and targets", tolerance=CAST)
def _(job: Job) -> Results:
    model, _ = job.zoo("t5")
    targets = [padded(mine(job, sentences(5 + seed)[::-1]), -100) for seed in range(2)]
    batches = [{**causal(job, sentences(seed)), "labels": labels} for seed, labels in enumerate(targets)]
    return trained(job, job.parallel(model, batches[0]), batches)


class Averaged(nn.Module):
    """A classifier of the mean of its tokens, of those that the mask shows or of all."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.masked = nn.Embedding(VOCABULARY, 12), nn.Linear(12, 2), masked

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, mask = self.embedding(input_ids), attention_mask[..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1) if self.masked else hidden.mean(1)
        logits = self.head(pooled)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@script("trains on the mean of the tokens that are masked in")
def _(job: Job) -> Results:
    batches = [classified(job, sentences(seed)) for seed in range(2)]
    return trained(job, job.parallel(made(lambda: Averaged(masked=True)), batches[0]), batches)


@script("trains on the mean over all positions", refused="is another one", settings=("dp2", "tp2", "dp4", "mix4"))
def _(job: Job) -> Results:
    batches = [classified(job, sentences())]
    return trained(job, job.parallel(made(lambda: Averaged(masked=False)), batches[0]), batches)


@script("evaluates on unequal lengths and gets logits of its own length back", tolerance=CAST)
@torch.no_grad()
def _(job: Job) -> Results:
    model, _ = job.llama()
    rows = sentences()
    model = job.parallel(model, causal(job, rows)).eval()
    batch = causal(job, rows)
    output = model(**batch)
    assert output.logits.shape[:2] == batch["input_ids"].shape
    shown = [logits[: len(row)].sum() for logits, row in zip(output.logits, mine(job, rows), strict=True)]
    return {"loss": output.loss.float(), "logits": job.gathered(torch.stack(shown))}


@script("evaluates without labels on unequal lengths")
@torch.no_grad()
def _(job: Job) -> Results:
    model, _ = job.llama()
    rows = sentences()
    model = job.parallel(model, causal(job, rows)).eval()
    batch = {name: tensor for name, tensor in causal(job, rows).items() if name != "labels"}
    logits = model(**batch, use_cache=False).logits
    shown = [one[: len(row)].sum() for one, row in zip(logits, mine(job, rows), strict=True)]
    return {"logits": job.gathered(torch.stack(shown))}


@script("accumulates gradients over batches of unequal lengths", tolerance=CAST)
def _(job: Job) -> Results:
    model, _ = job.llama()
    batches = [causal(job, sentences(seed)[: ROWS - 4 * (seed % 2)]) for seed in range(3)]
    model = job.parallel(model, batches[0])
    for batch in batches:
        (loss_of(model(**batch)) / 3).backward()
    return job.gradients(model)
