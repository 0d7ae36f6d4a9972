"""DPO by trl's trainer: pairs of answers, a reference model that stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

import hetu_fx
from tests.scripts.repositories.utils import Log, options, save, setup

WORDS = 40


def tokenizer() -> Any:
    """Return a tokenizer of numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{str(number): number for number in range(2, WORDS)}}
    made = Tokenizer(WordLevel(words, "<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def preferences(count: int, seed: int) -> Any:
    """Return prompts, for each an answer that counts on and is chosen, and one of random numbers."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        start = int(torch.randint(2, WORDS - 8, (), generator=generator))
        other = torch.randint(2, WORDS, (4,), generator=generator).tolist()
        chosen = range(start + 1, start + 4 + number % 3)
        rows.append({"prompt": f"{start}", "chosen": " ".join(map(str, chosen)), "rejected": " ".join(map(str, other))})
    return Dataset.from_list(rows)


def main(argv: Sequence[str] | None = None) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    parser = options(__doc__ or "", lr=5e-2)
    parser.add_argument("--beta", type=float, default=0.1)
    args = parser.parse_args(argv)
    rank, world = setup(args)
    log = Log(args, rank)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).to(getattr(torch, args.dtype))
    reference = copy.deepcopy(model)
    if args.plan:
        tokens = torch.ones(4, 8, dtype=torch.long)
        example = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        model = hetu_fx.auto_parallelize(model, example, plan=args.plan, outputs="all")
    config = DPOConfig(
        output_dir=str(args.out / "run"), beta=args.beta, learning_rate=args.lr, optim="sgd",
        per_device_train_batch_size=args.batch_size // world, per_device_eval_batch_size=args.batch_size // world,
        num_train_epochs=args.epochs, lr_scheduler_type="cosine", max_grad_norm=args.clip,
        eval_strategy="epoch", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        bf16=False, gradient_checkpointing=False, seed=args.seed,
    )  # fmt: skip
    trainer = DPOTrainer(
        model, reference, config, train_dataset=preferences(16, 1), eval_dataset=preferences(8, 2),
        processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    names = ("loss", "grad_norm", "learning_rate")  # rewards of the first steps are rounding
    for entry in trainer.state.log_history:
        found = {name: value for name, value in entry.items() if name.removeprefix("eval_") in names}
        if found:
            log(**found)
    save(args.out / "ckpt.pt", rank, model=model.state_dict())


if __name__ == "__main__":
    main()
