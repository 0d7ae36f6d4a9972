"""What accelerate's scripts take from a hub, made here: a tiny BERT with its tokenizer, sentence pairs, a metric."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [f"w{number}" for number in range(60)]
ROWS = {"train": 70, "validation": 45}  # they divide among no processes


def write_model(folder: Path) -> None:
    """Write what `from_pretrained` reads: weights without dropout, so that plans do not matter, and a tokenizer."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)


def load_dataset(*_: Any, **__: Any) -> DatasetDict:
    """Return pairs of sentences of unequal lengths, some of them equal, as GLUE's MRPC has them."""
    return DatasetDict({split: Dataset.from_list(_pairs(rows)) for split, rows in ROWS.items()})


def _pairs(rows: int) -> list[dict[str, Any]]:
    draw, made = random.Random(rows), []
    for index in range(rows):
        first = " ".join(draw.choices(WORDS, k=draw.randint(3, 9)))
        second = first if index % 2 else " ".join(draw.choices(WORDS, k=draw.randint(3, 9)))
        made.append({"sentence1": first, "sentence2": second, "label": index % 2, "idx": index})
    return made


class Accuracy:
    """What `evaluate.load("glue", "mrpc")` gives, without its F1."""

    def __init__(self) -> None:
        self._right: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        """Take in a batch."""
        self._right += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        """Return the accuracy, and begin again."""
        right, self._right = self._right, []
        assert len(right) == ROWS["validation"], "each row is to be counted once"
        return {"accuracy": sum(right) / len(right)}


class HostMemory:
    """What test_peak_memory_usage measures of accelerators only: here of the process, in MiB above its beginning."""

    def __enter__(self) -> HostMemory:
        self.begin = _most_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        self.used = self.peaked = (_most_bytes() - self.begin) >> 20


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
