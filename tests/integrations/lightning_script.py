"""Settings of Lightning's Trainer on a small model: `lightning_script.py FOLDER PLANS [SETTING...]`, by torchrun.

Several plans have commas between them. With DEVICES in the environment Lightning starts so many processes itself.

Each setting writes FOLDER/PLAN_SETTING_RANK.pt: losses, metrics, parameters and predictions. Without a strategy of ours
the same functions say what one device does.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import hetu_fx
from hetu_fx.integrations.lightning import FolderCheckpoints, HetuStrategy

ROWS, BATCH = 48, 8
PLANS = {
    "data": hetu_fx.Plan.data_parallel([0, 1], [3, 1]),
    "tensor": hetu_fx.Plan.tensor_parallel([0, 1]),
    "alone": hetu_fx.Plan.single(0),
}


class Net(nn.Module):
    """A network that makes its loss, where it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Linear(20, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        """Return the logits, and the loss before them."""
        logits = self.down(torch.tanh(self.norm(self.up(x))))
        return logits if y is None else {"loss": cross_entropy(logits, y), "logits": logits}


class Inner(LightningModule):
    """Its training step calls a module in it, which makes the loss."""

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Net()
        self.seen: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        made: Tensor = self.model(batch[0], y=batch[1])["loss"]
        return made

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the loss; the mean over all processes is kept."""
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True, batch_size=len(batch[0]))
        self.seen.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """Log the loss."""
        self.log("loss", cross_entropy(self.model(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Tensor:
        """Return the logits."""
        made: Tensor = self.model(batch[0])
        return made

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Outer(Inner):
    """Its training step calls itself, and makes the loss, with a parameter that no module that it calls has."""

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__(rate)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        """Return the logits."""
        return self.model(x)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return cross_entropy(self(batch[0]), batch[1])


class Scaled(Outer):
    """Calls the module in it, and scales what comes out by a parameter of its own."""

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return cross_entropy(self.model(batch[0]) * self.scale, batch[1])


class Tied(Inner):
    """Has one matrix under two names, and a buffer that is a view of a larger one."""

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__(rate)
        self.model.same = self.model.up
        self.register_buffer("view", torch.arange(12.0).reshape(3, 4)[:, 1:2])


class Manual(Outer):
    """Steps by itself, with two optimizers."""

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__(rate)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        """Step with both optimizers in turn."""
        optimizer = self.optimizers()[index % 2]
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.seen.append(float(self.trainer.strategy.reduce(loss.detach().clone())))

    def configure_optimizers(self) -> Any:
        """Return an optimizer for each layer."""
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.model.up, self.model.down)]


def rows(dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Return the data."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), torch.randint(0, 3, (ROWS,), generator=generator))


def loader(data: Dataset[Any], world: int) -> DataLoader[Any]:
    """Return the data in order: what all processes have is a batch of one device."""
    sampler = (
        DistributedSampler(data, world, int(os.environ.get("LOCAL_RANK", "0")), shuffle=False) if world > 1 else None
    )
    return DataLoader(data, BATCH // world, sampler=sampler)


class Runs:
    """Trains under one strategy.

    Args:
        folder: for files.
        plan: of `PLANS`; empty: Lightning alone.
    """

    def __init__(self, folder: Path, plan: str = "") -> None:
        self.folder, self.plan, self.in_folders = folder, plan, False
        self.world = int(os.environ.get("WORLD_SIZE", os.environ.get("DEVICES", "1"))) if plan else 1

    def trainer(self, epochs: int = 2, **options: Any) -> Trainer:
        """Make a Trainer."""
        saves = FolderCheckpoints() if self.in_folders else None
        return Trainer(
            strategy=HetuStrategy(PLANS[self.plan], checkpoint_io=saves) if self.plan else "auto",
            plugins=[saves] if saves and not self.plan else None,
            devices=self.world,
            accelerator="cpu",
            max_epochs=epochs,
            **{"enable_checkpointing": False, "logger": False, "num_sanity_val_steps": 0, **options},
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def fit_memory(self, model: LightningModule, trainer: Trainer, path: Path | None = None) -> dict[str, Any]:
        """Train, and return what is to be compared."""
        data, world = rows(next(model.parameters()).dtype), self.world
        trainer.fit(model, loader(data, world), DataLoader(data, BATCH // world), ckpt_path=path, weights_only=False)
        whole = {name: value.detach() for name, value in model.state_dict().items()}
        whole = {n: hetu_fx.full_tensor(v) for n, v in whole.items()}
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {"losses": list(model.seen), "metrics": metrics, "state": whole, "epoch": trainer.current_epoch}

    def plain(self) -> dict[str, Any]:
        """Train; validate, test and predict before and after, with rows that divide unevenly."""
        torch.manual_seed(3 + int(os.environ.get("LOCAL_RANK", "0")))  # that of the first process is every process's
        model, data = Outer().double(), rows()
        few = DataLoader(TensorDataset(*data[: BATCH + 1]), BATCH // 2)
        whole = DataLoader(data, BATCH // self.world)
        before = self.trainer().validate(model, whole, verbose=False)
        trainer = self.trainer(num_sanity_val_steps=2)
        made = self.fit_memory(model, trainer)
        told = trainer.strategy.broadcast({"path": self.folder / "a", "rank": trainer.global_rank}, self.world - 1)
        made["told"] = [told["path"] == self.folder / "a", told["rank"] + 1 == self.world]
        after = [self.trainer().validate(model, whole, verbose=False), self.trainer().test(model, whole, verbose=False)]
        predicted = torch.cat(self.trainer().predict(model, few))
        return {**made, "evaluated": [before, *after], "predicted": predicted}

    def accumulated(self) -> dict[str, Any]:
        """Accumulate gradients, and clip them by norm."""
        torch.manual_seed(3)
        model = Inner().double()
        return self.fit_memory(model, self.trainer(accumulate_grad_batches=4, gradient_clip_val=0.1))

    def resumed(self) -> dict[str, Any]:
        """Save every few steps; go on from one's own file, and from that of one device."""
        torch.manual_seed(3)
        own = self.plan or "one"
        saving = ModelCheckpoint(self.folder, filename=own, every_n_train_steps=4, enable_version_counter=False)
        self.fit_memory(Inner().double(), self.trainer(1, enable_checkpointing=True, callbacks=[saving]))
        return {source: self.gone_on(self.folder / f"{name}.ckpt") for source, name in (("own", own), ("one", "one"))}

    def foldered(self) -> dict[str, Any]:
        """Save to folders where a strategy of ours trains; go on from the last of them, and from a file."""
        self.in_folders = bool(self.plan)
        torch.manual_seed(3)
        own = f"{self.plan or 'one'}_in_folder"
        saving = ModelCheckpoint(self.folder, filename=own, every_n_train_steps=4, enable_version_counter=False)
        self.fit_memory(Tied().double(), self.trainer(1, enable_checkpointing=True, callbacks=[saving]))
        assert (self.folder / f"{own}.ckpt").is_dir() == self.in_folders
        return {
            source: self.gone_on(self.folder / f"{name}.ckpt", Tied)
            for source, name in (("own", own), ("one", "one_in_folder"))
        }

    def gone_on(self, path: Path, kind: type[Inner] = Inner) -> dict[str, Any]:
        """Go on from a checkpoint, with parameters that are other ones before."""
        torch.manual_seed(7)
        return self.fit_memory(kind().double(), self.trainer(3), path)

    def stopped(self) -> dict[str, Any]:
        """Stop early, as the metric is to rise; clip by value; one parameter is of no parallel module."""
        torch.manual_seed(3)
        stop: Callback = EarlyStopping("loss", mode="max", patience=1, verbose=False)
        options = {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01, "callbacks": [stop]}
        return self.fit_memory(Scaled().double(), self.trainer(9, **options))

    def scaled(self) -> dict[str, Any]:
        """Clip by norm, with a parameter of no parallel module."""
        torch.manual_seed(3)
        return self.fit_memory(Scaled().double(), self.trainer(accumulate_grad_batches=2, gradient_clip_val=0.1))

    def manual(self) -> dict[str, Any]:
        """Optimize by hand."""
        torch.manual_seed(3)
        return self.fit_memory(Manual().double(), self.trainer())

    def low(self) -> dict[str, Any]:
        """Train in mixed precision."""
        torch.manual_seed(3)
        model = Outer()
        return self.fit_memory(model, self.trainer(precision="bf16-mixed"))


SETTINGS = ("plain", "accumulated", "resumed", "foldered", "stopped", "scaled", "manual", "low")


def main() -> None:
    """Run every setting under every plan."""
    folder, plans = Path(sys.argv[1]), sys.argv[2].split(",")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for plan, setting in itertools.product(plans, sys.argv[3:] or SETTINGS):
        made = getattr(Runs(folder, plan), setting)()
        torch.save(made, folder / f"{plan}_{setting}_{os.environ.get('LOCAL_RANK', '0')}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # where Lightning starts processes, the first does not wait for them


if __name__ == "__main__":
    main()
