"""A mixture of experts whose experts are shared out over the processes, and a plan that is written by hand.

python examples/experts.py
torchrun --nproc-per-node 2 examples/experts.py
"""

from __future__ import annotations

import os

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import hetu_fx

ROWS, LENGTH, STEPS = 8, 32, 15
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def batch() -> torch.Tensor:
    """Return rows that count upwards from a random number, modulo the vocabulary."""
    return (torch.randint(0, 64, (ROWS, 1)) + torch.arange(LENGTH)) % 64


if __name__ == "__main__":
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS, num_attention_heads=4, num_key_value_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = batch()
    # One group of all processes: each holds some of the experts, some of the heads, some of the vocabulary.
    plan = hetu_fx.Plan((hetu_fx.Pipeline((hetu_fx.Stage(tuple(range(WORLD))),)),))
    example = {"input_ids": rows, "labels": rows}
    model = hetu_fx.auto_parallelize(model, example, plan=plan, optimizer=optimizer, data="global")  # the one line
    losses = []
    for _ in range(STEPS):
        rows = batch()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
