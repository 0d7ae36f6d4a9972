"""Run accelerate's own scripts as they come, each model that they prepare made parallel before.

`accelerate launch ... accelerate_scripts.py SHARES FOLDER NAME...`, with SHARES as 3:1, or plain; several have commas
between them, and come one after another. Each rank writes FOLDER/SHARES/NAME.RANK.txt: "passed", or the traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import hetu_fx

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
import hub  # noqa: E402

from tests.ranks.remembered import remembered_captures  # noqa: E402

EXAMPLES: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "RegressionModel": lambda: {"x": torch.randn(16)},
    "Linear": lambda: {"input": torch.randn(4, 1)},
    "BertForSequenceClassification": lambda: _tokens(),
}
HUB = ("checkpointing", "peak_memory_usage", "performance")
PLACES = {name: f"external_deps.test_{name}" for name in (*HUB, "metrics")}


LEFT_OUT = {
    "sync": ("test_distributed_sync", "test_distributed_sync_multiple_fwd"),  # gradients differ inside no_sync
    "distributed_data_loop": (  # join_uneven_inputs does nothing on CPUs
        "test_can_join_uneven_inputs", "test_join_can_override_even_batches",
        "test_join_can_override_for_mixed_type_dataloaders",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches",
        "test_stateful_dataloader", "test_stateful_dataloader_save_state",  # they need torchdata
    ),
}  # fmt: skip


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.randint(4, 60, (16, 12))
    mask = torch.ones_like(tokens)
    return {
        "input_ids": tokens, "token_type_ids": torch.zeros_like(tokens), "attention_mask": mask,
        "labels": torch.randint(0, 2, (16,)),
    }  # fmt: skip


EVALUATE = ModuleType("evaluate")
EVALUATE.load = lambda *_: hub.Accuracy()  # type: ignore[attr-defined]


@contextmanager
def prepared_models_are_parallel(shares: str) -> Iterator[None]:
    """Do before every `prepare` what the script's one line would do; nothing for plain shares."""
    if shares == "plain":
        yield
        return
    plan = hetu_fx.Plan.data_parallel((0, 1), tuple(map(int, shares.split(":"))))
    prepare = Accelerator.prepare

    @wraps(prepare)
    def with_the_line(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        optimizer = next((one for one in args if isinstance(one, torch.optim.Optimizer)), None)
        for model in args:
            if isinstance(model, nn.Module) and not hasattr(model, "hetu"):
                example = EXAMPLES[type(model).__name__]()
                hetu_fx.auto_parallelize(
                    model, example, plan=plan, optimizer=optimizer, options=hetu_fx.Options(wait_seconds=20)
                )
        return prepare(self, *args, **kwargs)

    Accelerator.prepare = with_the_line
    try:
        with remembered_captures():
            yield
    finally:
        Accelerator.prepare = prepare


def script(name: str) -> ModuleType:
    """Import a script, with what it would take from a hub, and from accelerators, taken from here."""
    sys.modules["evaluate"] = EVALUATE  # the package that some import need not be there
    module = importlib.import_module(f"accelerate.test_utils.scripts.{PLACES.get(name, f'test_{name}')}")
    if name in HUB:
        module.load_dataset = hub.load_dataset
        module.TorchTracemalloc = hub.HostMemory
    for function in LEFT_OUT.get(name, ()):
        setattr(module, function, lambda *_: None)
    if name == "sync":
        module.check_model_parameters = only_after_steps(module.check_model_parameters)
    return module


def only_after_steps(check: Callable[..., None]) -> Callable[..., None]:
    """Leave out that gradients differ where no step has been done."""
    return lambda one, other, did_step, *rest, **options: did_step and check(one, other, True, *rest, **options)


def bert(folder: Path) -> Path:
    """Return where a process has its model: none waits for another."""
    return folder / f"bert.{os.environ['RANK']}"


def arguments(name: str, folder: Path) -> list[list[str]]:
    """Return the command lines that a script is called with, one after another."""
    if name not in HUB:
        return [[]]
    given = ["--model_name_or_path", str(bert(folder)), "--output_dir", str(folder / f"of_{name}")]
    if name == "checkpointing":
        return [given, [*given, "--resume_from_checkpoint", str(folder / f"of_{name}" / "epoch_0")]]
    return [[*given, "--num_epochs", "1"]]


def run(name: str, folder: Path, number: int) -> str:
    """Run a script, in process groups from a number on; return "passed" or the traceback."""
    try:
        for line in arguments(name, folder):
            sys.argv = [name, *line]
            (folder / f"of_{name}").mkdir(exist_ok=True)
            start(number := number + 1)
            script(name).main()
    except Exception:
        return traceback.format_exc()
    return "passed"


def start(number: int) -> None:
    """Forget the state of the script before, which may have ended the process group, and join another group.

    All groups meet in the launcher's store: no more ports are needed, which others may have.
    """
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if dist.is_initialized():
        dist.destroy_process_group()
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.PrefixStore(f"script{number}", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))


def main(every: str, place: str, names: Sequence[str]) -> None:
    """Run the scripts with all shares, and write what came of each."""
    rank, number = int(os.environ["RANK"]), 0
    for shares in every.split(","):
        folder = Path(place) / shares
        folder.mkdir(exist_ok=True)
        hub.write_model(bert(folder))
        with prepared_models_are_parallel(shares):
            for name in names:
                print("running", name, "with shares", shares, flush=True)
                (folder / f"{name}.{rank}.txt").write_text(run(name, folder, number))
                number += 10


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
