"""A GPT of characters, as nanoGPT trains one: accumulation, EMA, evaluation, samples, checkpoints that are resumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hetu_fx
from tests.scripts.repositories.utils import Log, average, options, save, setup

TEXT = "the quick brown fox jumps over the lazy dog while five boxing wizards jump quickly to the sphinx of quartz " * 9
CHARS = sorted(set(TEXT))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (one.view(B, T, self.heads, C // self.heads).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, block_size: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, T = idx.size()
        assert T <= self.block_size, f"cannot forward a sequence of length {T}, block size is {self.block_size}"
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.block_size :])
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return idx

    def configure_optimizer(self, weight_decay: float, lr: float) -> torch.optim.Optimizer:
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


class EMA:
    """Averages of the parameters over steps, put into the model for evaluation."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.backup: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(p, alpha=1 - self.decay)

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        self.backup = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.copy_(self.shadow[name])

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            p.copy_(self.backup[name])
        self.backup = {}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__ or "", lr=1e-2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--max-iters", type=int, default=3)
    parser.add_argument("--decay-iters", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--eval-interval", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args(argv)
    rank, world = setup(args)
    master, log = rank == 0, Log(args, rank)
    data = torch.tensor([CHARS.index(c) for c in TEXT])
    splits = {"train": data[:700], "val": data[700:]}
    generators = {split: torch.Generator().manual_seed(args.seed + number) for number, split in enumerate(splits)}

    def get_batch(split: str) -> tuple[Tensor, Tensor]:
        found = splits[split]
        ix = torch.randint(len(found) - args.block_size, (args.batch_size,), generator=generators[split])
        mine = ix.tolist()[rank::world]
        x = torch.stack([found[i : i + args.block_size] for i in mine])
        y = torch.stack([found[i + 1 : i + 1 + args.block_size] for i in mine])
        return x, y

    model, start = GPT(len(CHARS), args.block_size, width=16, layers=2, heads=2), 0
    optimizer = model.configure_optimizer(weight_decay=0.1, lr=args.lr)
    checkpoint = None
    if args.resume:
        checkpoint = torch.load(args.out / "ckpt.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["iter_num"]
        for split, state in checkpoint["data"].items():
            generators[split].set_state(state)
    if args.plan:
        example = splits["train"][: 4 * args.block_size].view(4, args.block_size)
        model = hetu_fx.auto_parallelize(model, (example, example), optimizer=optimizer, plan=args.plan)
    ema = EMA(model, decay=0.9)
    if checkpoint is not None:
        for name, value in checkpoint["ema"].items():
            ema.shadow[name].copy_(value)

    def get_lr(it: int) -> float:
        if it < 2:
            return args.lr * (it + 1) / 3
        return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, it / args.decay_iters))))

    @torch.no_grad()
    def estimate_loss() -> dict[str, list[float]]:
        model.eval()
        out = {}
        for split in splits:
            X, Y = get_batch(split)
            logits, loss = model(X, Y)
            out[split] = average(loss, (logits.argmax(-1) == Y).double().mean())
        model.train()
        return out

    for it in range(start, args.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        if it % args.eval_interval == 0:
            ema.apply(model)
            losses = estimate_loss()
            ema.restore(model)
            if master:
                sample = model.generate(splits["val"][None, :4], max_new_tokens=3)
                log(iter=it, **losses, sample="".join(CHARS[i] for i in sample[0].tolist()))
        for micro in range(args.accumulate):
            is_last = micro == args.accumulate - 1
            X, Y = get_batch("train")
            with model.no_sync() if args.plan and not is_last else nullcontext():
                logits, loss = model(X, Y)
                (loss / args.accumulate).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update(model)
        right = average((logits.argmax(-1) == Y).double().mean())
        log(iter=it, loss=loss.item(), norm=norm.item(), lr=optimizer.param_groups[0]["lr"], accuracy=right)
    states = {split: generator.get_state() for split, generator in generators.items()}
    contents = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": ema.shadow}
    save(args.out / "ckpt.pt", rank, **contents, iter_num=args.max_iters, data=states)


if __name__ == "__main__":
    main()
