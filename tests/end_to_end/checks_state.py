"""Checks of optimizers, buffers, checkpoints and exports; run on four ranks by test_state_features.py."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetu_fx
from hetu_fx.checkpoint.folders import seal
from hetu_fx.errors import ExportError
from hetu_fx.export import load as exports
from hetu_fx.export.load import load_exported
from hetu_fx.plans.plan import Plan, Stage
from tests.end_to_end.cells import LOSS_FNS, make_model
from tests.end_to_end.twins import Twins, adamw, batch_of, dp, loss_of, one, rows_of, same_tensors, wholes, world_of

TP = Plan((one(Stage((0, 1), (2, 1))),), name="TP")
PIPES = Plan((one(Stage((0,)), Stage((1,)), rows=2, micro_batches=2), one(Stage((2,)), rows=1)), name="pipes")

OPTIMIZERS = {
    "AdamW": adamw,
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


class WithScale(nn.Module):
    """A small model with a parameter of no dims, and one that a loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 24), nn.Linear(24, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x) * self.scale))


def check_an_optimizer_with_state_goes_on(rank: int, world: int, folder: Path) -> None:
    """One step is taken before the call; clipping by torch's own function in between."""
    if (group := world_of(3)) is None:
        return
    for make in OPTIMIZERS.values():
        torch.manual_seed(2)
        plain = WithScale().double()
        model = copy.deepcopy(plain)
        optimizers = [make(m.parameters()) for m in (plain, model)]
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            batch = batch_of("mlp", 6)
            LOSS_FNS["mlp"](m(**batch), **batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        hetu_fx.auto_parallelize(
            model, batch, plan=dp(3, 1, 2), loss_fn=LOSS_FNS["mlp"], optimizer=optimizers[1], process_group=group
        )
        for seed in range(3):
            batch = batch_of("mlp", 7, seed=seed)
            LOSS_FNS["mlp"](plain(**batch), **batch).backward()
            loss_of(model(**rows_of(batch, (3, 3, 1)))).backward()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, model)]
            torch.testing.assert_close(torch.as_tensor(float(norms[1])), torch.as_tensor(float(norms[0])))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            same_tensors(wholes(model), wholes(plain), 1e-8)


def check_running_statistics_equal_one_device(rank: int, world: int, folder: Path) -> None:
    if (group := world_of(3)) is None:
        return
    twins = Twins("conv", dp(3, 1), group)
    for seed in range(2):
        twins.step(batch_of("conv", 7, seed=seed), (3, 2, 2))
    twins.model.hetu.save(folder / "conv")
    buffers = buffers_of(twins.plain)
    same_tensors(buffers_of(twins.model), buffers, 1e-9)
    fresh = make_model("conv")
    hetu_fx.auto_parallelize(fresh, batch_of("conv", 5), plan=dp(1, 1), process_group=group)
    fresh.hetu.load(folder / "conv")
    same_tensors(buffers_of(fresh), buffers, 1e-9)
    same_tensors(wholes(fresh), wholes(twins.model), 0.0)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.double() for name, buffer in model.named_buffers()}


def check_a_checkpoint_continues_on_fewer_ranks(rank: int, world: int, folder: Path) -> None:
    """Three ranks save, two and one go on exactly; tied weights stay tied; transformers reads the folder."""
    saved, batches = folder / "gpt2", [batch_of("gpt2", 6, seed=seed) for seed in range(3)]
    if (group := world_of(3)) is not None:
        twins = Twins("gpt2", PIPES, group)
        twins.step(batches[0], (3, 2, 1))
        twins.model.hetu.save(saved, optimizer=twins.optimizers[1], extra={"epoch": 4})
        twins.step(batches[1], (3, 2, 1))
        twins.step(batches[2], (1, 2, 3))
        _transformers_reads(saved, batches[0])
        for size, plan, counts in ((2, TP, (4, 2)), (1, dp(1), (6,))):
            if (smaller := world_of(size)) is not None:
                _go_on(saved, plan, smaller, batches, counts, wholes_of(twins))


def wholes_of(twins: Twins) -> dict[str, Any]:
    return {name: p.detach() for name, p in twins.plain.named_parameters()}


def _transformers_reads(saved: Path, batch: dict[str, torch.Tensor]) -> None:
    plain = make_model("gpt2")
    read = type(plain).from_pretrained(saved)
    assert read.lm_head.weight is read.transformer.wte.weight
    assert read.dtype == torch.float64


def _go_on(saved: Path, plan: Plan, group: Any, batches: list[Any], counts: Any, expected: dict[str, Any]) -> None:
    model = make_model("gpt2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    hetu_fx.auto_parallelize(model, batches[0], plan=plan, optimizer=optimizer, process_group=group)
    assert model.hetu.load(saved, optimizer=optimizer) == {"epoch": 4}
    assert model.hetu.stats["steps"] == 1
    for batch in batches[1:]:
        loss_of(model(**rows_of(batch, counts))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.lm_head.weight is model.transformer.wte.weight
    same_tensors(wholes(model), expected, 2e-5)


def check_an_export_runs_in_new_processes(rank: int, world: int, folder: Path) -> None:
    """Two ranks export two plans, of uneven replicas and tensor parallel; new processes give one device's loss."""
    if (group := world_of(2)) is None:
        return
    twins = Twins("llama", [TP, replace(dp(3, 1), name="DP")], group, data="global")
    twins.step(batch_of("llama", 4))
    twins.model.hetu.export(folder / "export")
    batch = batch_of("llama", 8, 9, seed=3)
    expected = float(loss_of(twins.plain(**batch)))
    if rank == 0:
        _check_folder(folder / "export")
        count = torch.tensor(float((batch["labels"][:, 1:] != -100).sum()))
        parts = [{name: value.split((6, 2))[i] for name, value in batch.items()} for i in range(2)]
        rows = {"TP": [batch, batch], "DP": parts}
        torch.save(
            {n: [_given(folder, n, i, g, count) for i, g in enumerate(all_)] for n, all_ in rows.items()},
            folder / "given.pt",
        )
        losses = run_exported(folder, ("TP", "DP"), 2)
        assert losses["TP"] == pytest.approx([expected] * 2, rel=1e-6)
        assert sum(losses["DP"]) == pytest.approx(expected, rel=1e-6)
        single = torch.export.load(folder / "export" / "single" / "evaluation.pt2").module()
        assert float(single(**batch)["loss"]) == pytest.approx(expected, rel=1e-6)
        _changed_files_are_refused(folder / "export")
    dist.barrier(group)


def _given(
    folder: Path, variant: str, rank: int, rows: dict[str, torch.Tensor], count: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return what a rank's graph takes, by its keywords: its rows, and the count of all rows' labels."""
    entry = json.loads((folder / "export" / "manifest.json").read_text())["variants"][variant]["ranks"][str(rank)]
    given = {slot["name"]: slot["kind"] for slot in entry["slots"] if slot["kind"] in ("input", "count")}
    return {name: rows[name] if kind == "input" else count for name, kind in given.items()}


def _check_folder(export: Path) -> None:
    text = (export / "manifest.json").read_text()
    assert str(export.parent) not in text
    files = [entry["file"] for v in json.loads(text)["variants"].values() for entry in v["ranks"].values()]
    ranks = ("DP/rank0", "DP/rank1", "TP/rank0", "TP/rank1")
    assert sorted(files) == [f"variants/{rank}.pt2" for rank in ranks]
    assert exports.check_exported(export).is_good


def run_exported(folder: Path, variants: Sequence[str], processes: int) -> dict[str, list[float]]:
    """Run exported variants in new processes; give the loss that each rank prints for each."""
    script = Path(__file__).with_name("exported_rank.py")
    command = [sys.executable, str(script), str(folder), str(processes)]
    commands = ([*command, str(rank), *variants] for rank in range(processes))
    workers = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in commands]
    try:
        told = [json.loads(worker.communicate(timeout=200)[0]) for worker in workers]
        return {variant: [of_rank[variant] for of_rank in told] for variant in variants}
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _changed_files_are_refused(export: Path) -> None:
    path = export / "variants" / "TP" / "rank1.pt2"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ExportError, match=r"rank1\.pt2 is torn"):
        load_exported(export, "TP", 1)
    with pytest.raises(ExportError, match=r"(?s)no graph of variant 'PP'.*TP"):
        load_exported(export, "PP", 0)
    manifest = export / "manifest.json"
    manifest.write_text(manifest.read_text().replace("hetu_fx.export/3", "hetu_fx.export/7"))
    seal(export)
    with pytest.raises(ExportError, match="export/7"):
        load_exported(export, "TP", 0)
