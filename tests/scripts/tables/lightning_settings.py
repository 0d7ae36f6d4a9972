"""Settings of Lightning's Trainer beside those of `tests/integrations/lightning_script.py`; modules return losses."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.scripts.job import Job, whole
from tests.scripts.script import Results, script
from tests.scripts.tables.trainer_settings import PLANS

ROWS, BATCH, FEATURES, CLASSES = 48, 8, 10, 3


class Net(nn.Module):
    """Two blocks between two layers, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss, and what it is made from."""
        hidden = self.up(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.down(hidden)
        return {"loss": cross_entropy(logits, y), "logits": logits}


def _module() -> Any:
    """Return a LightningModule whose steps call the network."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.model, self.rate, self.seen = Net().double(), 1e-2, []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.model(*batch)["loss"]
            self.seen.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("valid", self.model(*batch)["loss"], sync_dist=True, batch_size=len(batch[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.rate)

    return Module()


def _loader(job: Job) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, CLASSES, (ROWS,), generator=generator))
    rows = DistributedSampler(data, job.world, job.rank, shuffle=False)
    return DataLoader(data, BATCH // job.world, sampler=rows)


def _trainer(job: Job, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    from hetu_fx.integrations.lightning import HetuStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    usual = {"logger": False, "enable_checkpointing": False, "max_epochs": 3, "default_root_dir": job.folder}
    return Trainer(
        strategy="auto" if job.plan is None else HetuStrategy(job.plan),
        devices=job.world,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**usual, **options},
    )


def _fitted(job: Job, **options: Any) -> Results:
    model, made = _module(), _trainer(job, **options)
    made.fit(model, _loader(job), _loader(job))
    return _found(model, made)


def _found(model: Any, made: Any) -> dict[str, Any]:
    valid = [float(made.callback_metrics["valid"])]
    return {"losses": model.seen, "valid": valid, **{name: whole(p) for name, p in model.named_parameters()}}


@script("Lightning: a module that returns its loss", settings=PLANS, seconds=120)
def _(job: Job) -> Results:
    return _fitted(job)


@script("Lightning: clipping with accumulation", settings=PLANS, seconds=120)
def _(job: Job) -> Results:
    return _fitted(job, accumulate_grad_batches=2, gradient_clip_val=0.1)


@script("Lightning: clipping by value with accumulation", settings=PLANS, seconds=120)
def _(job: Job) -> Results:
    return _fitted(job, accumulate_grad_batches=4, gradient_clip_val=0.01, gradient_clip_algorithm="value")


@script("Lightning: StochasticWeightAveraging", settings=PLANS, seconds=120)
def _(job: Job) -> Results:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return _fitted(job, max_epochs=4, callbacks=[StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)])


@script("Lightning: lr_find", settings=PLANS, seconds=120)
def _(job: Job) -> Results:
    from lightning.pytorch.tuner import Tuner

    model, made = _module(), _trainer(job, max_epochs=1)
    options = {"num_training": 8, "update_attr": True, "attr_name": "rate", "early_stop_threshold": None}
    found = Tuner(made).lr_find(model, _loader(job), **options)
    tried = {"rates": found.results["lr"], "smoothed": found.results["loss"], "rate": float(model.rate)}
    made.fit(model, _loader(job), _loader(job))
    return {**tried, **_found(model, made)}


@script("Lightning: a checkpoint, from which another Trainer goes on", settings=PLANS, seconds=120)
def _(job: Job) -> Results:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(job.folder, filename="made", every_n_train_steps=4, enable_version_counter=False)
    _fitted(job, max_epochs=1, enable_checkpointing=True, callbacks=[saving])
    model, made = _module(), _trainer(job)
    made.fit(model, _loader(job), _loader(job), ckpt_path=job.folder / "made.ckpt", weights_only=False)
    return _found(model, made)
