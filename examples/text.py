"""A language model that reads the sources of Python's standard library, byte by byte.

Every process is given the same whole batch (`data="global"`); hetu_fx decides who computes what of it.

    python examples/text.py
    torchrun --nproc-per-node 2 examples/text.py
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hetu_fx

ROWS, LENGTH, STEPS = 16, 64, 10
CONFIG = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def batches() -> torch.Tensor:
    """Return bytes of source code: (steps, rows, length)."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:20]
    text = b"".join(file.read_bytes() for file in files)[: STEPS * ROWS * LENGTH]
    return torch.tensor(list(text)).view(STEPS, ROWS, LENGTH)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, num_attention_heads=4, num_key_value_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = batches()
    example = {"input_ids": data[0], "labels": data[0]}
    model = hetu_fx.auto_parallelize(model, example, optimizer=optimizer, data="global")  # the one line
    losses = []
    for rows in data:
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
