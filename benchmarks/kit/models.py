"""The models that are measured: tiny configurations of real architectures, and batches for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.kit.smallest import HEAD_WIDTH, TOKENS, least


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama of `layers` blocks of `width`, trained on `rows` sequences of `tokens` bytes a step."""

    width: int
    layers: int
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, {self.rows} x {self.tokens} tokens"


def llama(size: Size, seed: int = 0) -> nn.Module:
    """Make the model, with the same weights in every process."""
    torch.manual_seed(seed)
    heads = size.width // 32
    width = heads * least(32, HEAD_WIDTH)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 16 * 16,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=size.tokens,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def gpt2(width: int, layers: int, seed: int = 0, *, vocabulary: int = 50257) -> nn.Module:
    """Make a GPT-2, with the usual vocabulary unless told otherwise."""
    torch.manual_seed(seed)
    heads = width // 64
    width = heads * least(64, HEAD_WIDTH)
    config = GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, use_cache=False)
    model: nn.Module = GPT2LMHeadModel(config)
    return model.train()


def batch(rows: int, tokens: int, *, vocabulary: int = 512, seed: int = 0) -> dict[str, Tensor]:
    """Make a batch of random tokens; labels are a tensor of their own, as from a collator."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (rows, least(tokens, TOKENS)), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def num_parameters(model: nn.Module) -> int:
    """Count the model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
