"""The model's own graphs for one device: run by torch alone, exact, with the model's names, or without its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import ExportError
from hetu_fx.export.load import check_exported
from hetu_fx.plans.plan import Plan

# In a process that never hears of hetu_fx.
RUN = """
import sys, torch
module = torch.export.load(sys.argv[1]).module()
made = module(**torch.load(sys.argv[2]))
made["loss"].backward()
assert not [name for name in sys.modules if name.startswith("hetu_fx")]
gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
torch.save({"loss": made["loss"].detach(), "gradients": gradients, "state": module.state_dict()}, sys.argv[3])
"""


class Tagger(nn.Module):
    """Tied and frozen parameters, running statistics, a buffer that is not saved, and dropout."""

    scale: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].weight.requires_grad_(False)
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embed(tokens) * self.scale
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        hidden = self.dropout(self.norm(hidden.mean(1)))
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def batch_of(rows: int = 4, length: int = 5) -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 11, (rows, length)), "labels": torch.randint(0, 11, (rows,))}


@dataclass(frozen=True)
class Exported:
    folder: Path
    plain: nn.Module

    @property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        return found

    def load(self, mode: str) -> Any:
        return torch.export.load(self.folder / "single" / f"{mode}.pt2").module()


def export(model: nn.Module, batch: dict[str, Tensor], folder: Path, **options: Any) -> Exported:
    plain: Any = deepcopy(model)
    parallel: Any = hetu_fx.auto_parallelize(model, batch, plan=Plan.single())
    parallel.hetu.export(folder, **options)
    return Exported(folder, plain)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    torch.manual_seed(0)
    return export(Tagger().double(), batch_of(), tmp_path_factory.mktemp("tagger") / "export")


def test_the_training_graph_runs_and_trains_without_us(tagger: Exported, tmp_path: Path) -> None:
    batch = batch_of(7, 9)
    torch.save(batch, tmp_path / "batch.pt")
    paths = [str(tagger.folder / "single" / "training.pt2"), str(tmp_path / "batch.pt"), str(tmp_path / "made.pt")]
    subprocess.run([sys.executable, "-I", "-c", RUN, *paths], check=True, timeout=240, cwd=tmp_path)
    made, plain = torch.load(tmp_path / "made.pt"), deepcopy(tagger.plain).train()
    loss = plain(**batch)["loss"]
    loss.backward()
    torch.testing.assert_close(made["loss"], loss.detach(), rtol=1e-12, atol=0)
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    torch.testing.assert_close(made["gradients"], gradients, rtol=1e-10, atol=1e-14)
    tied = tagger.manifest["single"]["tied"]
    assert tied == {"head.weight": "embed.weight"}
    expected = {name: value for name, value in plain.state_dict().items() if name not in tied}  # statistics updated
    torch.testing.assert_close(made["state"], expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("rows", [1, 6])
def test_evaluation_and_inference_are_the_models(tagger: Exported, rows: int) -> None:
    batch, plain = batch_of(rows, 8), tagger.plain.eval()
    expected = plain(**batch)
    torch.testing.assert_close(dict(tagger.load("evaluation")(**batch)), expected, rtol=1e-12, atol=0)
    inferred = tagger.load("inference")(tokens=batch["tokens"])
    assert list(inferred) == ["logits"]
    torch.testing.assert_close(inferred["logits"], expected["logits"], rtol=1e-12, atol=0)


def test_the_manifest_says_what_graphs_take_and_make(tagger: Exported) -> None:
    graphs = tagger.manifest["single"]["graphs"]
    assert list(graphs) == ["training", "evaluation", "inference"]
    assert list(graphs["inference"]["inputs"]) == ["tokens"]
    assert graphs["evaluation"]["outputs"] == {"loss": "loss", "logits": "value"}
    rows, length = graphs["training"]["inputs"]["tokens"]
    assert isinstance(rows, str)
    assert isinstance(length, str)
    assert graphs["training"]["inputs"]["labels"] == [rows]


def test_graphs_without_weights_take_those_beside_them(tmp_path: Path) -> None:
    torch.manual_seed(1)
    found = export(Tagger().double(), batch_of(), tmp_path / "export", weights=False)
    weights = found.manifest["weights"]
    assert weights["norm.weight"] == {"shape": [6], "dtype": "float64", "file": "weights/model.safetensors"}
    assert set(weights) == {name for name, _ in found.plain.named_parameters()}
    assert check_exported(found.folder).is_good
    module, batch = found.load("inference"), batch_of(3)
    with pytest.raises(RuntimeError):
        module(tokens=batch["tokens"])
    module.load_state_dict(load_file(found.folder / "weights" / "model.safetensors"), assign=True, strict=False)
    expected = found.plain.eval()(batch["tokens"])["logits"]
    torch.testing.assert_close(module(tokens=batch["tokens"])["logits"], expected, rtol=1e-12, atol=0)
    (found.folder / "weights" / "model.safetensors").write_bytes(b"torn")
    assert "model.safetensors is torn" in check_exported(found.folder).damaged[0]


def test_dropout_is_torchs_own(tmp_path: Path) -> None:
    torch.manual_seed(2)
    found = export(Tagger(0.5).double(), batch_of(), tmp_path / "export")
    graphs = [torch.export.load(found.folder / "single" / f"{m}.pt2").graph for m in ("training", "evaluation")]
    assert not [node for graph in graphs for node in graph.nodes if str(node.target).startswith("hetu")]
    module, batch = found.load("training"), batch_of()
    torch.manual_seed(3)
    loss = module(**batch)["loss"]
    torch.manual_seed(3)
    torch.testing.assert_close(loss, found.plain(**batch)["loss"], rtol=1e-12, atol=0)


class Sum(nn.Module):
    """A model whose batch is nested, and positional."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, parts: dict[str, Any], *others: Tensor) -> Tensor:
        return (self.linear(parts["left"]) + parts["more"][0] + sum(others)).square().mean()


def test_nested_and_positional_arguments_stay_what_they_are(tmp_path: Path) -> None:
    batch = ({"left": torch.randn(4, 3), "more": [torch.randn(4, 1)]}, torch.randn(4, 1))
    model: Any = Sum()
    plain = deepcopy(model)
    hetu_fx.auto_parallelize(model, batch, plan=Plan.single())
    model.hetu.export(tmp_path / "export")
    module = torch.export.load(tmp_path / "export" / "single" / "training.pt2").module()
    more = ({"left": torch.randn(6, 3), "more": [torch.randn(6, 1)]}, torch.randn(6, 1))
    assert float(module(*more)["loss"]) == pytest.approx(float(plain(*more)), rel=1e-6)
    missing = json.loads((tmp_path / "export" / "manifest.json").read_text())["single"]["graphs"]["inference"]
    assert "nothing but its loss" in missing["missing"]


class Needy(nn.Module):
    """A forward that cannot run without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear(x)
        return nn.functional.cross_entropy(logits, labels), logits


def test_a_forward_that_needs_labels_has_no_inference_graph_and_it_is_said(tmp_path: Path) -> None:
    found = export(Needy(), {"x": torch.randn(4, 3), "labels": torch.randint(0, 2, (4,))}, tmp_path / "export")
    assert "does not run without labels" in found.manifest["single"]["graphs"]["inference"]["missing"]
    assert not (found.folder / "single" / "inference.pt2").exists()


class Checked(nn.Module):
    """A forward that checks values of its input and of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        logits = self.linear(x)
        if x.isnan().any() or not logits.isfinite().all():
            raise ValueError("no numbers")
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def test_checks_of_values_are_left_out(tmp_path: Path) -> None:
    found = export(Checked(), {"x": torch.randn(4, 3), "labels": torch.randint(0, 2, (4,))}, tmp_path / "export")
    graphs = found.manifest["single"]["graphs"]
    assert {mode: sorted(graph["outputs"].values()) for mode, graph in graphs.items()} == {
        "training": ["loss", "value"], "evaluation": ["loss", "value"], "inference": ["value"],
    }  # fmt: skip


def test_a_model_that_has_changed_since_its_last_step_is_refused(tmp_path: Path) -> None:
    model: Any = Tagger()
    hetu_fx.auto_parallelize(model, batch_of(), plan=Plan.single())
    model.layers[1].weight.requires_grad_(False)
    with pytest.raises(ExportError, match="changed since its last training batch"):
        model.hetu.export(tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_weights_for_which_there_is_no_room_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: Callable[..., Any] = lambda device: (("machine of node here", 100),)  # noqa: E731
    monkeypatch.setattr("hetu_fx.export.single.memory_left", left)
    model: Any = Tagger()
    hetu_fx.auto_parallelize(model, batch_of(), plan=Plan.single())
    with pytest.raises(ExportError, match=r"need \d+ bytes of host memory.*100 bytes(.|\n)*hint: .*weights=False"):
        model.hetu.export(tmp_path / "export")
    model.hetu.export(tmp_path / "export", weights=False)
