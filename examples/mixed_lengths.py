"""Sequences of mixed lengths without padding: functions of the standard library, each at its own length.

python examples/mixed_lengths.py
torchrun --nproc-per-node 2 examples/mixed_lengths.py
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import hetu_fx

LONGEST, TOKENS, STEPS = 128, 1024, 6
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def texts() -> list[torch.Tensor]:
    """Return paragraphs of source code, from a few bytes to many."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:10]
    parts = [part for file in files for part in file.read_bytes().split(b"\n\n") if len(part) > 8]
    return [torch.tensor(list(part)) for part in parts]


if __name__ == "__main__":
    torch.manual_seed(0)
    data = texts()
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = torch.zeros(8, LONGEST, dtype=torch.long)
    example = {"input_ids": rows, "labels": rows, "use_cache": False}
    plan = hetu_fx.Plan.data_parallel(range(WORLD))
    model = hetu_fx.auto_parallelize(model, example, plan=plan, optimizer=optimizer, data="global")  # the one line
    sampler = hetu_fx.TokenBudgetSampler([len(text) for text in data], tokens=TOKENS, longest=LONGEST)
    collate = functools.partial(hetu_fx.nested_batch, use_cache=False)
    loader = DataLoader(hetu_fx.Pieces(data), batch_sampler=sampler, collate_fn=collate)
    losses = []
    for _, batch in zip(range(STEPS), model.hetu.ahead(loader), strict=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
