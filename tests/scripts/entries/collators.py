"""Batches as collators make them, of transformers and by hand: each process pads to its own longest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tests.scripts.entries.lengths import CAST, SIZES, VOCABULARY, made, mine, sentences, trained
from tests.scripts.job import Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.settings import SEVERAL
from tests.scripts.trainers import logged, trainer

_SINGLE = 1e-5  # a Trainer logs losses and norms in single precision
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Features = list[dict[str, Any]]


def tokenizer(**options: Any) -> Any:
    """Return a tokenizer whose tokens are numbers, with one of padding and one that masks."""
    import transformers as hf
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<pad>": 0, "<mask>": 1, **{str(token): token for token in range(2, VOCABULARY)}}
    names = {"pad_token": "<pad>", "mask_token": "<mask>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<pad>")), **names, **options)


def collator(name: str, side: str = "right", **options: Any) -> Callable[[Features], dict[str, Tensor]]:
    """Return a collator of transformers."""
    import transformers as hf

    made = getattr(hf, name)(tokenizer(padding_side=side), **options)
    return lambda features: dict(made(features))


def features(rows: list[list[int]], labels: list[Any] | None = None) -> Features:
    """Return what a data set gives for some rows."""
    found: Features = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    for feature, label in zip(found, labels or (), strict=False):
        feature["labels"] = label
    return found


def bert(kind: str, **options: Any) -> nn.Module:
    """Return a small Bert without dropout."""
    import transformers as hf

    config = hf.BertConfig(**SIZES, **QUIET, vocab_size=VOCABULARY, **options)
    return made(lambda: getattr(hf, kind)(config))


def trained_on(job: Job, model: nn.Module, collate: Any, batches: list[Features]) -> Results:
    """Train on batches of which each rank collates its own rows."""
    collated = [collate(mine(job, rows)) for rows in batches]
    return trained(job, job.parallel(model, collated[0]), collated)


@script("collates for language modelling", tolerance=CAST)
def _(job: Job) -> Results:
    collate = collator("DataCollatorForLanguageModeling", mlm=False)
    return trained_on(job, job.llama()[0], collate, [features(sentences(seed)) for seed in range(2)])


@script("collates for masked language modelling", tolerance=CAST)
def _(job: Job) -> Results:
    choices = {"mlm_probability": 1.0, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
    collate = collator("DataCollatorForLanguageModeling", **choices)
    return trained_on(job, bert("BertForMaskedLM"), collate, [features(sentences(seed)) for seed in range(2)])


@script("collates to multiples of eight", tolerance=CAST)
def _(job: Job) -> Results:
    collate = collator("DataCollatorForLanguageModeling", mlm=False, pad_to_multiple_of=8)
    return trained_on(job, job.llama()[0], collate, [features(sentences(seed)) for seed in range(2)])


@script("collates with padding for a classifier", tolerance=CAST)
def _(job: Job) -> Results:
    rows = [features(sentences(seed), [i % 2 for i in range(8)]) for seed in range(2)]
    return trained_on(job, bert("BertForSequenceClassification"), collator("DataCollatorWithPadding"), rows)


@script("collates for a classifier of tokens", tolerance=CAST)
def _(job: Job) -> Results:
    texts = [sentences(seed) for seed in range(2)]
    rows = [features(text, [[token % 5 for token in row] for row in text]) for text in texts]
    collate = collator("DataCollatorForTokenClassification")
    return trained_on(job, bert("BertForTokenClassification", num_labels=5), collate, rows)


def bart() -> nn.Module:
    """Return a small Bart without dropout."""
    import transformers as hf

    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    config = hf.BartConfig(**layers, **sizes, **special, vocab_size=VOCABULARY, dropout=0.0, forced_eos_token_id=None)
    return made(lambda: hf.BartForConditionalGeneration(config))


def pairs(seed: int) -> Features:
    return features(sentences(seed), [row[: 1 + len(row) // 2] for row in sentences(7 + seed)[::-1]])


@script("collates for a T5", tolerance=CAST)
def _(job: Job) -> Results:
    return trained_on(job, job.zoo("t5")[0], collator("DataCollatorForSeq2Seq"), [pairs(seed) for seed in range(2)])


@script("collates for a Bart, with the decoder's inputs", tolerance=CAST)
def _(job: Job) -> Results:
    model = bart()
    return trained_on(job, model, collator("DataCollatorForSeq2Seq", model=model), [pairs(seed) for seed in range(2)])


@script("scores the last token of prompts that are padded on the left", tolerance=CAST)
@torch.no_grad()
def _(job: Job) -> Results:
    collate = collator("DataCollatorWithPadding", "left")
    prompts = collate(features(mine(job, sentences())))
    model = job.llama()[0]
    model = job.parallel(model, prompts).eval()
    return {"scores": job.gathered(model(**prompts, use_cache=False).logits[:, -1])}


@script("packs the rows of a batch into one with positions that restart", tolerance=CAST)
def _(job: Job) -> Results:
    import transformers as hf

    collate = hf.DataCollatorWithFlattening()
    rows = [[{"input_ids": row} for row in sentences(seed)] for seed in range(2)]
    packed = [{**collate(mine(job, batch)), "use_cache": False} for batch in rows]
    return trained(job, job.parallel(job.llama()[0], packed[0]), packed)


class Images(nn.Module):
    """A convolutional net for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(x).relu().mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@script("brings images of unequal sizes", refused="is not the same on all ranks", settings=SEVERAL)
def _(job: Job) -> Results:
    size = 8 + 2 * job.rank
    batch = {"x": torch.randn(4, 3, size, size, dtype=torch.float64), "labels": torch.arange(4)}
    return trained(job, job.parallel(made(Images), batch), [batch])


class Recurrent(nn.Module):
    """A GRU that tags tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(VOCABULARY, 12), nn.GRU(12, 16, batch_first=True)
        self.head = nn.Linear(16, 7)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        states, _ = self.gru(self.embedding(tokens))
        logits = self.head(states)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), "logits": logits}


def by_hand(rows: list[list[int]]) -> dict[str, Tensor]:
    """Collate with `pad_sequence`, without a mask; the loss leaves -1 out."""
    tokens = [torch.tensor(row) for row in rows]
    return {"tokens": pad_sequence(tokens, True), "targets": pad_sequence([row % 7 for row in tokens], True, -1)}


@script("collates by hand for a recurrent net", refused="is not the same on all ranks", settings=SEVERAL)
def _(job: Job) -> Results:
    return trained_on(job, made(Recurrent), by_hand, [sentences(seed) for seed in range(2)])


class Encoder(nn.Module):
    """torch's own encoder, which is told what to hide."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.embedding, self.body = nn.Embedding(VOCABULARY, 16), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 7)

    def forward(self, tokens: Tensor, targets: Tensor, hidden: Tensor | None = None) -> dict[str, Tensor]:
        hidden = tokens == 0 if hidden is None else hidden
        logits = self.head(self.body(self.embedding(tokens), src_key_padding_mask=hidden))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1), "logits": logits}


@script("hides padding in an encoder of torch, which finds it itself")
def _(job: Job) -> Results:
    return trained_on(job, made(Encoder), by_hand, [sentences(seed) for seed in range(2)])


@script("hides padding in an encoder of torch by a mask that is True there")
def _(job: Job) -> Results:
    def collate(rows: list[list[int]]) -> dict[str, Tensor]:
        batch = by_hand(rows)
        return {**batch, "hidden": batch["tokens"] == 0}

    return trained_on(job, made(Encoder), collate, [sentences(seed) for seed in range(2)])


class Spoken(nn.Module):
    """Frames to letters, with a loss over all their alignments."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 9)

    def forward(self, frames: Tensor, targets: Tensor, frame_counts: Tensor, target_counts: Tensor) -> Any:
        scores = self.head(frames).log_softmax(-1).transpose(0, 1)
        return {"loss": F.ctc_loss(scores, targets, frame_counts, target_counts, reduction="sum")}


@script("learns from unaligned targets and their lengths", refused="cannot capture", settings=("one", *SEVERAL))
def _(job: Job) -> Results:
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randn(2 * n + 3, 6, generator=drawn, dtype=torch.float64) for n in (6, 3, 5, 2, 4, 3, 2, 2)]
    targets = [torch.randint(1, 9, ((len(row) - 3) // 2,), generator=drawn) for row in rows]
    batch = {
        "frames": pad_sequence(mine(job, rows), True),
        "targets": pad_sequence(mine(job, targets), True),
        "frame_counts": torch.tensor(list(map(len, mine(job, rows)))),
        "target_counts": torch.tensor(list(map(len, mine(job, targets)))),
    }
    return trained(job, job.parallel(made(Spoken), batch), [batch])


@script("trains by Trainer with a collator that pads", tolerance=_SINGLE)
def _(job: Job) -> Results:
    rows = [row for seed in range(3) for row in sentences(seed)]
    model = job.llama()[0]
    collate = collator("DataCollatorForLanguageModeling", mlm=False)
    job.parallel(model, collate(features(rows[:4])))
    found = trainer(job, model, data_collator=collate)
    found.train_dataset = features(rows)
    found.train()
    return {**logged(found, "loss", "grad_norm"), **job.parameters(model)}


@script("evaluates by Trainer with a collator that pads", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model = job.llama()[0]
    collate = collator("DataCollatorForLanguageModeling", mlm=False)
    job.parallel(model, collate(features(sentences()[:4])))
    found = trainer(job, model, {"prediction_loss_only": True}, data_collator=collate)
    return {"loss": found.evaluate(features(sentences() + sentences(1)))["eval_loss"]}


@script("takes gradients of embedded tokens of unequal lengths", refused="needs a gradient", tolerance=CAST)
def _(job: Job) -> Results:
    batch = collator("DataCollatorForLanguageModeling", mlm=False)(features(mine(job, sentences())))
    table = torch.randn(VOCABULARY, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)).double()
    embedded = table[batch.pop("input_ids")].requires_grad_()
    batch = {"inputs_embeds": embedded, **batch}
    model = job.parallel(job.llama()[0], batch)
    loss = loss_of(model(**batch))
    loss.backward()
    return {"loss": loss.detach(), **job.gradients(model)}
