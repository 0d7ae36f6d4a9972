"""Hugging Face's Trainer as it is: train, evaluate, save.

python examples/trainer.py
torchrun --nproc-per-node 2 examples/trainer.py
"""

from __future__ import annotations

import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hetu_fx

LENGTH, STEPS = 32, 8
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Return rows that count upwards from a random number, modulo the vocabulary."""
    tokens = (torch.randint(0, 64, (count, 1)) + torch.arange(LENGTH)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]


if __name__ == "__main__":
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model, train, test = GPT2LMHeadModel(config), rows(8 * STEPS), rows(16)
    example = {name: torch.stack([row[name] for row in train[: 8 // WORLD]]) for name in train[0]}
    model = hetu_fx.auto_parallelize(model, example)  # the one line
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8 // WORLD,
            num_train_epochs=1,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=test)
        trainer.train()
        trainer.evaluate()
        trainer.save_model(folder)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
