"""A script of accelerate, or of a Trainer, that does not name hetu_fx.

`python untouched_script.py FOLDER accelerate|trainer|sft` trains a tiny model and writes FOLDER/rank_R.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

ROWS, STEPS = 8, 3


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 20)
        self.down = torch.nn.Linear(20, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.down(torch.tanh(self.up(x)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    xs = torch.randn(ROWS * STEPS, 6, generator=generator)
    return [{"x": x, "labels": torch.tensor(index % 3)} for index, x in enumerate(xs)]


def with_accelerate() -> tuple[Any, list[float]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows(), batch_size=ROWS // accelerator.num_processes)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return model, losses


def with_trainer(folder: Path, kind: str) -> tuple[Any, list[float]]:
    import os

    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    model = LlamaForCausalLM(config)
    tokens = [[1 + (start + at) % 30 for at in range(8)] for start in range(ROWS * STEPS)]
    common: dict[str, Any] = {
        "output_dir": str(folder / "out"), "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no",
        "per_device_train_batch_size": ROWS // int(os.environ.get("WORLD_SIZE", "1")), "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "learning_rate": 1e-2,
    }  # fmt: skip
    if kind == "trainer":
        data = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model=model, args=TrainingArguments(**common), train_dataset=data)  # type: ignore[arg-type]
    else:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"input_ids": row} for row in tokens])
        arguments = SFTConfig(**common, bf16=False, dataset_kwargs={"skip_prepare_dataset": True})
        trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=_tokenizer())
    trainer.train()
    return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(32)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")), pad_token="w0", eos_token="w31")


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    model, losses = with_accelerate() if kind == "accelerate" else with_trainer(folder, kind)
    handle = getattr(model, "hetu", None)
    plan = None if handle is None else handle.plan.to_json()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (folder / f"rank_{rank}.json").write_text(json.dumps({"losses": losses, "plan": plan}))


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
