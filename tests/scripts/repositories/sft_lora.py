"""Supervised fine-tuning with LoRA in a loop: prompts are masked, batches padded, gradients accumulated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import hetu_fx
from tests.scripts.repositories.utils import Log, average, loader, options, save, setup, total

VOCABULARY, PAD = 48, 0
Row = dict[str, Tensor]


class Instructions(Dataset[Row]):
    """A prompt of random tokens, and an answer that counts on from its last; only the answer is learnt."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = list[Row]()
        for number in range(count):
            prompt = torch.randint(1, VOCABULARY, (3 + number % 3,), generator=generator)
            answer = (prompt[-1] + torch.arange(1, 3 + number % 4)) % VOCABULARY
            labels = torch.cat([torch.full_like(prompt, -100), answer])
            self.rows.append({"input_ids": torch.cat([prompt, answer]), "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def collate(rows: list[Row]) -> Row:
    """Pad to the longest row of all, so that processes have batches of one length."""
    ids = pad_sequence([*(row["input_ids"] for row in rows), torch.zeros(10, dtype=torch.long)], batch_first=True)[:-1]
    labels = torch.full_like(ids, -100)
    for row, one in zip(labels, rows, strict=True):
        row[: len(one["labels"])] = one["labels"]
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def main(argv: Sequence[str] | None = None) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

    parser = options(__doc__ or "", lr=2e-2)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args(argv)
    rank, world = setup(args)
    log = Log(args, rank)
    train = loader(Instructions(32, 1), args, rank, world, collate=collate)
    test = loader(Instructions(12, 2), args, rank, world, train=False, collate=collate)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=PAD)).to(
        getattr(torch, args.dtype)
    )
    adapter = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, adapter).to(getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    steps = args.epochs * len(train) // args.accumulate
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, steps)
    if args.plan:
        model = hetu_fx.auto_parallelize(model, next(iter(train)), optimizer=optimizer, plan=args.plan)

    for epoch in range(args.epochs):
        train.sampler.set_epoch(epoch)
        model.train()
        for number, batch in enumerate(train):
            loss = model(**batch).loss
            (loss / args.accumulate).backward()
            if number % args.accumulate == args.accumulate - 1:
                norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                log(loss=loss.item(), norm=norm.item(), lr=scheduler.get_last_lr())
        model.eval()
        right = seen = 0
        losses = []
        with torch.no_grad():
            for batch in test:
                out = model(**batch)
                losses.append(out.loss.item())
                kept = batch["labels"][:, 1:] != -100
                right += int(((out.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]) & kept).sum())
                seen += int(kept.sum())
        right, seen = total(right, seen)
        log(epoch=epoch, test_loss=average(sum(losses) / len(losses)), accuracy=right / seen)
    save(args.out / "ckpt.pt", rank, model=get_peft_model_state_dict(model), optimizer=optimizer.state_dict())
    if rank == 0:
        model.save_pretrained(args.out / "adapter")
        log(files=sorted(path.name for path in (args.out / "adapter").iterdir()))


if __name__ == "__main__":
    main()
