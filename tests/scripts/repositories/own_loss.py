"""Hugging Face's Trainer with a `compute_loss` of its own: a focal loss of logits; the labels stay in the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

import hetu_fx
from tests.scripts.repositories.utils import Log, options, save, setup

LABELS, WORDS, LENGTH = 3, 40, 8


class Sentences(Dataset[dict[str, Tensor]]):
    """Rows of tokens, some of them padding, with a label that most tokens are a multiple of."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, LABELS, (count,), generator=generator)
        tokens = 1 + torch.randint(0, (WORDS - 1) // LABELS, (count, LENGTH), generator=generator) * LABELS
        self.tokens = tokens + self.labels[:, None]
        self.mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (count, 1), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = self.mask[index].long()
        return {"input_ids": self.tokens[index] * mask, "attention_mask": mask, "labels": self.labels[index]}


def focal_loss(logits: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """Return the mean cross entropy of rows, of which those that are right already weigh less."""
    each = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-each)) ** gamma * each).mean()


def metrics(found: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(found.predictions, -1) == found.label_ids).mean())}


def main(argv: Sequence[str] | None = None) -> None:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    parser = options(__doc__ or "", lr=5e-2)
    parser.add_argument("--gamma", type=float, default=2.0)
    args = parser.parse_args(argv)
    rank, world = setup(args)
    log = Log(args, rank)

    class FocalTrainer(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs["labels"]
            outputs = model(**inputs)
            loss = focal_loss(outputs.logits, labels, args.gamma)
            return (loss, outputs) if return_outputs else loss

    sizes = {"vocab_size": WORDS + LABELS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **dropped, num_attention_heads=2, num_labels=LABELS, max_position_embeddings=LENGTH)
    model = BertForSequenceClassification(config).to(getattr(torch, args.dtype))
    train, test = Sentences(24, 1), Sentences(13, 2)
    arguments = TrainingArguments(
        output_dir=str(args.out / "run"), learning_rate=args.lr, optim="sgd", num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size // world, per_device_eval_batch_size=args.batch_size // world,
        lr_scheduler_type="cosine", warmup_steps=1, max_grad_norm=args.clip, eval_strategy="epoch", logging_steps=1,
        save_strategy="epoch", report_to=[], disable_tqdm=True, use_cpu=True, seed=args.seed,
    )  # fmt: skip
    if args.plan:
        example = torch.utils.data.default_collate([train[i] for i in range(args.batch_size // world)])
        model = hetu_fx.auto_parallelize(model, example, plan=args.plan)
    trainer = FocalTrainer(model, arguments, train_dataset=train, eval_dataset=test, compute_metrics=metrics)
    trainer.train()
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    for entry in trainer.state.log_history:
        found = {name: value for name, value in entry.items() if name in names}
        if found:
            log(**found)
    found = trainer.predict(test)
    log(predictions=np.asarray(found.predictions).ravel().tolist(), accuracy=found.metrics["test_accuracy"])
    save(args.out / "ckpt.pt", rank, model=model.state_dict())


if __name__ == "__main__":
    main()
