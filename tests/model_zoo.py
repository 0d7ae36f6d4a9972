"""Tiny models that tests capture, with example batches. Sizes differ, so that equal sizes mean equal dims.

Export takes seconds, so `captured` does it once per model and process.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph

LENGTH = 13
VOCABULARY = 97
TRANSFORMER = {"num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 48, "intermediate_size": 112}


@dataclass(frozen=True)
class Sample:
    """A model and how to make batches for it: `batch(rows, length)`."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, torch.Tensor]]


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, length))


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    """Labels with an uneven number of ignored ones per row."""
    labels = ids.clone()
    for row in range(len(labels)):
        labels[row, : row % (labels.size(1) - 1)] = -100
    return labels


def causal_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = tokens(rows, length)
    return {"input_ids": ids, "labels": labels_of(ids)}


def masked_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    batch = causal_batch(rows, length)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length - 2 :] = 0
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": batch["labels"]}


def image_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 28, 28), "labels": torch.randint(0, 13, (rows,))}


def translation_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(rows, length), "labels": labels_of(tokens(rows, length - 4))}


def conv_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, 13, (rows,))}


class ConvNet(nn.Module):
    """A small convolutional net with batch norm, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(3, 12, 3, padding=1)
        self.stem = nn.Sequential(conv, nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(12, 20, 3, stride=2, padding=1), nn.BatchNorm2d(20), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(20, 13)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.pool(self.body(self.stem(x))).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def llama(**changes: Any) -> nn.Module:
    sizes = {**TRANSFORMER, "num_key_value_heads": 3, "max_position_embeddings": 64, "vocab_size": VOCABULARY}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**sizes, **changes}))


def gpt2(**changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**{**sizes, **changes}))


def bert(**changes: Any) -> nn.Module:
    sizes = {**TRANSFORMER, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    return hf.BertForMaskedLM(hf.BertConfig(**{**sizes, **changes}))


def vit(**changes: Any) -> nn.Module:
    sizes = {**TRANSFORMER, "image_size": 28, "patch_size": 7, "num_labels": 13}
    return hf.ViTForImageClassification(hf.ViTConfig(**{**sizes, **changes}))


def t5(**changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 8, "d_ff": 112, "num_layers": 2, "num_heads": 6}
    sizes.update(decoder_start_token_id=0, pad_token_id=0)
    return hf.T5ForConditionalGeneration(hf.T5Config(**{**sizes, **changes}))


def mixtral(**changes: Any) -> nn.Module:
    sizes = {**TRANSFORMER, "num_key_value_heads": 3, "max_position_embeddings": 64, "vocab_size": VOCABULARY}
    sizes.update(num_local_experts=5, num_experts_per_tok=2, output_router_logits=True)
    return hf.MixtralForCausalLM(hf.MixtralConfig(**{**sizes, **changes}))


SAMPLES = {
    sample.name: sample
    for sample in (
        Sample("llama", llama, causal_batch),
        Sample("gpt2", gpt2, causal_batch),
        Sample("bert", bert, masked_batch),
        Sample("vit", vit, image_batch),
        Sample("t5", t5, translation_batch),
        Sample("mixtral", mixtral, causal_batch),
        Sample("conv", ConvNet, conv_batch),
    )
}


def to_double(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


NO_DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}


def example(name: str) -> dict[str, torch.Tensor]:
    """Return the batch on which a model is captured; its number of rows is no other size of the model."""
    return to_double(SAMPLES[name].batch(5 if name == "vit" else 7, LENGTH))


def captured(name: str, *, dropout: bool = True) -> tuple[nn.Module, Graph]:
    """Return a copy of a model in training mode, and its graph, which passes leave as it is.

    Parameters and inputs are of float64, but for mixtral, whose grouped products know no float64.

    Args:
        name: which model.
        dropout: as the model comes, or with all dropout left out.
    """
    model, graph = _captured(name, dropout and name in NO_DROPOUT)
    return copy.deepcopy(model), graph


@functools.cache
def _captured(name: str, drops: bool) -> tuple[nn.Module, Graph]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = SAMPLES[name].model(**{} if drops else NO_DROPOUT.get(name, {})).train(), example(name)
        model = model if name == "mixtral" else model.double()
        return model, capture(model, batch)
