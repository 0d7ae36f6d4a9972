"""The demo's model and training step: ordinary transformers and torch, nothing of ours."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hetu_fx.demo.data import VOCABULARY, Batch
from hetu_fx.demo.settings import DemoSettings

Clock = Callable[[str, float, float], None]


def make_model(settings: DemoSettings) -> nn.Module:
    """Make the model, with the same weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.width,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        max_position_embeddings=settings.long_length,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def make_optimizer(model: nn.Module, settings: DemoSettings) -> torch.optim.Optimizer:
    """Make the optimizer that every contestant uses."""
    return torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, clock: Clock | None = None) -> float:
    """Do one step of the ordinary loop; return the loss. `clock` is told what took from when to when."""
    times = [time.perf_counter()]
    loss: Tensor = model(**batch).loss
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())
    if clock is not None:
        for kind, start, end in zip(("forward", "backward", "optimizer"), times, times[1:], strict=False):
            clock(kind, start, end)
    return loss.item()


def loss_of(model: nn.Module, batch: Batch) -> float:
    """Return the loss of a batch, without training on it."""
    with torch.no_grad():
        return float(model(**batch).loss.item())


def num_parameters(model: nn.Module) -> int:
    """Count the model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names and exact values, to tell whether two processes have the same."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].detach().contiguous().numpy().tobytes())
    return total.hexdigest()
