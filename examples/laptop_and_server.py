"""Unequal devices: who is faster gets more rows, or more layers. The plan is made from what is measured, and explained.

A model too small for two stays on the fast device (this one at a hidden_size of 64); the plan says who is left out.

python examples/laptop_and_server.py
hetu-fx emulate --speeds 1.2,0.4 -- python examples/laptop_and_server.py
"""

from __future__ import annotations

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hetu_fx

ROWS, LENGTH, STEPS = 32, 128, 6
SIZES = {"vocab_size": 64, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2}


def batch() -> torch.Tensor:
    """Return rows that count upwards from a random number, modulo the vocabulary."""
    return (torch.randint(0, 64, (ROWS, 1)) + torch.arange(LENGTH)) % 64


if __name__ == "__main__":
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = batch()
    example = {"input_ids": rows, "labels": rows}
    model = hetu_fx.auto_parallelize(model, example, optimizer=optimizer, data="global")  # the one line
    if os.environ.get("RANK", "0") == "0":
        print(model.hetu.explain())
    losses = []
    for _ in range(STEPS):
        rows = batch()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
