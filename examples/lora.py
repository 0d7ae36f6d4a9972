"""LoRA: peft adds small matrices to a frozen model, which are trained in parallel and saved alone.

python examples/lora.py
torchrun --nproc-per-node 2 examples/lora.py
"""

from __future__ import annotations

import os
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hetu_fx

ROWS, LENGTH, STEPS = 8, 32, 10
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def batch() -> torch.Tensor:
    """Return rows that count upwards from a random number, modulo the vocabulary."""
    return (torch.randint(0, 64, (ROWS, 1)) + torch.arange(LENGTH)) % 64


if __name__ == "__main__":
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    rows = batch()
    example = {"input_ids": rows, "labels": rows}
    model = hetu_fx.auto_parallelize(model, example, optimizer=optimizer, data="global")  # the one line
    losses = []
    for _ in range(STEPS):
        rows = batch()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # on every process, each into a folder of its own here
        print("adapter:", *sorted(os.listdir(folder)))
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
