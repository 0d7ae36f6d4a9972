"""Checkpoints in one process: layout, strictness, atomicity."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.checkpoint import checkpoint, folders
from hetu_fx.checkpoint.checkpoint import parse_size
from hetu_fx.checkpoint.folders import is_complete, latest
from hetu_fx.checkpoint.manifest import MANIFEST
from hetu_fx.checkpoint.open_folder import OpenFolder
from hetu_fx.checkpoint.tensor_files import WeightFiles, plan_shards
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CheckpointError
from hetu_fx.switching.home.ops import HomeTensor, home_layout

save_checkpoint = partial(checkpoint.save_checkpoint, table=GroupTable.dry(0, 1))
load_checkpoint = partial(checkpoint.load_checkpoint, table=GroupTable.dry(0, 1))


def weights(fill: float = 0.0) -> dict[str, Tensor]:
    return {
        "embed": torch.arange(12.0).view(4, 3) + fill,
        "scale": torch.tensor(2.0 + fill),
        "mask": torch.tensor([True, False]),
        "half": torch.full((5,), 0.5 + fill, dtype=torch.bfloat16),
    }


def test_one_file_is_what_hugging_face_reads(tmp_path: Path) -> None:
    tied = {**weights(), "head": weights()["embed"]}
    save_checkpoint(tmp_path / "out", tied, aliases={"head": "embed"})
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [MANIFEST, "model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights().keys()
    assert all(torch.equal(found[name], value) for name, value in weights().items())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_shards_and_index_are_those_of_the_hub_library() -> None:
    hub = pytest.importorskip("huggingface_hub")
    tensors = {f"t{i}": torch.zeros(n) for i, n in enumerate((10, 300, 20, 30, 5, 200, 1))}
    split = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=300)
    assert plan_shards(tensors, 300) == split.filename_to_tensors


def test_many_files_have_an_index(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "out", weights(), max_shard_size=50)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 20, "total_size": 64}
    assert set(index["weight_map"].values()) == {f"model-{i}-of-00002.safetensors" for i in ("00001", "00002")}
    target = {name: torch.zeros_like(value) for name, value in weights().items()}
    load_checkpoint(tmp_path / "out", target, verify=True)
    assert all(torch.equal(target[name], value) for name, value in weights().items())


def test_a_foreign_folder_with_aliases_is_read(tmp_path: Path) -> None:
    save_file({"head": weights()["embed"]}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = {"embed": torch.zeros(4, 3)}
    load_checkpoint(tmp_path, target, aliases={"head": "embed"})
    assert torch.equal(target["embed"], weights()["embed"])


def test_misfits_are_named_and_change_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "out", weights())
    with pytest.raises(CheckpointError, match=r"missing in the file \[new\], unknown here \[half, mask, scale\]"):
        load_checkpoint(tmp_path / "out", {"embed": torch.zeros(4, 3), "new": torch.zeros(1)})
    target = {name: torch.zeros_like(value) for name, value in weights().items()} | {"embed": torch.zeros(3, 4)}
    with pytest.raises(CheckpointError, match=r"embed: \(4, 3\) torch.float32 in the file, \(3, 4\)"):
        load_checkpoint(tmp_path / "out", target)
    assert not target["scale"].any()
    with pytest.raises(CheckpointError, match="float64 here"):
        load_checkpoint(tmp_path / "out", {**weights(), "scale": torch.zeros((), dtype=torch.float64)})
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "nowhere", target)


def test_a_failed_save_leaves_the_old_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "out", weights())

    def fail(folder: Path) -> None:
        raise ValueError("no config today")

    with pytest.raises(CheckpointError, match="no config today"):
        save_checkpoint(tmp_path / "out", weights(1.0), write_config=fail)
    target = weights(5.0)
    load_checkpoint(tmp_path / "out", target, verify=True)
    assert torch.equal(target["embed"], weights()["embed"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_crash_while_replacing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    save_checkpoint(tmp_path / "out", weights())
    done = []
    rename = os.rename

    def crash(source: Path, target: Path) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(source)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crash)
        patch.setattr(folders.shutil, "rmtree", lambda *args, **kwargs: None)
        if renames < 2:
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path / "out", weights(1.0))
        else:
            save_checkpoint(tmp_path / "out", weights(1.0))
    before, target = sorted(os.listdir(tmp_path)), weights(5.0)
    assert latest(tmp_path) == tmp_path / "out"
    load_checkpoint(tmp_path / "out", target, verify=True)
    assert sorted(os.listdir(tmp_path)) == before  # a reader does not write
    assert torch.equal(target["embed"], weights(0.0 if renames == 0 else 1.0)["embed"])
    save_checkpoint(tmp_path / "out", weights(2.0))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_torn_and_damaged_folders_are_refused_and_skipped(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        save_checkpoint(tmp_path / f"step-{step}", weights())
    assert latest(tmp_path) == tmp_path / "step-11"
    file = tmp_path / "step-11" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert not is_complete(tmp_path / "step-11")
    assert latest(tmp_path) == tmp_path / "step-10"
    with pytest.raises(CheckpointError, match="is torn"):
        load_checkpoint(tmp_path / "step-11", weights())
    file = tmp_path / "step-10" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="is damaged: the sum of bytes 0 to"):
        load_checkpoint(tmp_path / "step-10", weights())
    assert latest(tmp_path / "empty") is None


def trained(kind: type[torch.optim.Optimizer], **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]
    for _ in range(2):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1), "fused": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adafactor, {"lr": 0.1}),
        (torch.optim.NAdam, {"lr": 0.1}),
    ],
)
def test_training_goes_on_as_if_never_stopped(
    tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, object]
) -> None:
    model, optimizer = trained(kind, **options)
    parameters = dict(model.named_parameters())
    save_checkpoint(tmp_path / "out", parameters, optimizer=optimizer, parameters=parameters, extra={"step": 2})
    other = nn.Linear(3, 4)
    fresh = kind(other.parameters(), lr=0.5)  # type: ignore[call-arg]
    load_checkpoint(tmp_path / "out", dict(other.named_parameters()))
    assert load_checkpoint(tmp_path / "out", {}, optimizer=fresh, parameters=dict(other.named_parameters())) == {
        "step": 2
    }
    for some, its in ((model, optimizer), (other, fresh)):
        its.zero_grad()
        some(torch.ones(2, 3)).square().sum().backward()
        its.step()
    assert torch.equal(model.weight, other.weight)
    assert not any("pkl" in path.name or path.suffix in (".bin", ".pt") for path in tmp_path.rglob("*"))


def _changed(document: dict[str, Any], **options: object) -> None:
    document["groups"][0]["options"] |= options


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a rate that is a word": (lambda found: _changed(found, lr="x"), "option 'lr' is 'x', where the optimizer has 0.5"),
    "a rate without end": (lambda found: _changed(found, lr=math.inf), "option 'lr' is inf"),
    "momenta of another number": (lambda found: _changed(found, betas={"tuple": [0.9]}), "option 'betas'"),
    "an option that is missing": (lambda found: found["groups"][0]["options"].pop("eps"), "options .'eps'. of a group"),
    "a step that is no number": (
        lambda found: found["state"]["weight"]["step"].update(number=math.nan),
        "state 'step' of 'weight' is nan",
    ),
    "a step that is missing": (lambda found: found["state"]["bias"].pop("step"), "state 'step' of 'bias' is missing"),
    "state that is missing": (
        lambda found: found["state"]["bias"].pop("exp_avg_sq"),
        "state 'exp_avg_sq' of 'bias' is missing",
    ),
    "a shape that has no room": (
        lambda found: found["state"]["weight"]["exp_avg"].update(shape=[2**40, 2**20]),
        "boxes .* of state 'exp_avg' of 'weight', which do not make",
    ),
    "another shape": (lambda found: found["state"]["weight"]["exp_avg"].update(shape=[3, 4]), "which do not make"),
    "a dtype that is none": (
        lambda found: found["state"]["weight"]["exp_avg"].update(dtype="load"),
        "'load' is no dtype of torch",
    ),
    "a parameter that is none": (lambda found: found["state"].update(other={}), "KeyError: 'other'"),
    "no groups": (lambda found: found.pop("groups"), "KeyError: 'groups'"),
    "another format": (lambda found: found.update(format="x"), "has format 'x', expected 'hetu_fx.training/1'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_training_state_that_cannot_be_is_refused_and_changes_nothing(tmp_path: Path, fault: str) -> None:
    model, optimizer = trained(torch.optim.AdamW, lr=0.1)
    parameters = dict(model.named_parameters())
    save_checkpoint(tmp_path / "out", parameters, optimizer=optimizer, parameters=parameters)
    path = tmp_path / "out" / "hetu_fx" / "training_state.json"
    change, told = FAULTS[fault]
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    folders.seal(tmp_path / "out")
    model, optimizer = trained(torch.optim.AdamW, lr=0.5)
    parameters = dict(model.named_parameters())
    before = copy.deepcopy((list(parameters.values()), optimizer.state_dict()))
    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(tmp_path / "out", parameters, optimizer=optimizer, parameters=parameters)
    torch.testing.assert_close((list(parameters.values()), optimizer.state_dict()), before, rtol=0, atol=0)


def test_what_a_caller_adds_may_have_no_end(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD, lr=0.1)
    parameters, extra = dict(model.named_parameters()), {"best": math.inf}
    save_checkpoint(tmp_path / "out", {}, optimizer=optimizer, parameters=parameters, extra=extra)
    assert load_checkpoint(tmp_path / "out", {}, optimizer=optimizer, parameters=parameters) == extra


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/../../b", "", 7])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, file: object) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(CheckpointError, match=r"no file inside its folder|no 'weight_map' of names of files"):
        load_checkpoint(tmp_path / "in", {"x": torch.zeros(2)})


@pytest.mark.parametrize("times", [1, 3])
def test_a_folder_that_is_replaced_while_it_is_read_is_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    save_checkpoint(tmp_path / "out", weights())
    left = list(range(times))

    def replaced_meanwhile(opened: OpenFolder, file: str) -> WeightFiles:
        if left:
            save_checkpoint(tmp_path / "out", weights(1.0 + left.pop()))
        return WeightFiles(opened, file)

    monkeypatch.setattr(checkpoint, "WeightFiles", replaced_meanwhile)
    target = weights(9.0)
    load_checkpoint(tmp_path / "out", target)
    assert all(torch.equal(target[name], value) for name, value in weights(1.0).items())


def test_a_folder_of_the_first_format_is_read_and_its_sums_compared(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    data = (tmp_path / "model.safetensors").read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"format": "hetu_fx.folder/1", "files": {"model.safetensors": entry}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    target = weights(5.0)
    load_checkpoint(tmp_path, target)
    assert torch.equal(target["embed"], weights()["embed"])
    (tmp_path / "model.safetensors").write_bytes(data[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: its sum is"):
        load_checkpoint(tmp_path, target)


def test_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    save_checkpoint(tmp_path / "out", {}, optimizer=optimizer, parameters=dict(model.named_parameters()))
    with pytest.raises(CheckpointError, match=r"missing in the file \['other'\], unknown here \['bias'\]"):
        load_checkpoint(
            tmp_path / "out", {}, optimizer=optimizer, parameters={"weight": model.weight, "other": model.bias}
        )
    with pytest.raises(CheckpointError, match="none of the model's"):
        save_checkpoint(tmp_path / "out", {}, optimizer=optimizer, parameters={"weight": model.weight})


def test_state_that_only_pickle_could_hold_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer.state[model.bias]["history"] = [torch.zeros(3)]
    with pytest.raises(CheckpointError, match="state 'history' of 'bias' is a list"):
        save_checkpoint(tmp_path / "out", {}, optimizer=optimizer, parameters=dict(model.named_parameters()))
    assert not list(tmp_path.iterdir())


def test_a_home_tensor_of_one_rank_is_saved_and_loaded(tmp_path: Path) -> None:
    layout = home_layout(Annotation.on((0,)), (4, 3), 0, 1)
    home = HomeTensor.from_full(weights()["embed"], layout)
    save_checkpoint(tmp_path / "out", {"embed": home})
    with torch.no_grad():
        home.zero_()
    load_checkpoint(tmp_path / "out", {"embed": home})
    assert torch.equal(home.local, weights()["embed"])


def test_sizes_are_decimal() -> None:
    assert [parse_size(size) for size in (7, "5GB", "0.5 MB")] == [7, 5 * 10**9, 500_000]
    with pytest.raises(CheckpointError, match="cannot read the size 'big'"):
        parse_size("big")
